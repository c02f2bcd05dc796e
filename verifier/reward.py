"""What a verifier left, read as a reward: one rule for each spelling, and never a silent 0.

`reward.json` wins over `reward.txt` wherever it exists. A reward is a finite number and nothing else:

- `reward.txt`: one decimal number, ASCII, with or without sign, fraction and exponent, in ASCII white space.
  `True`, `0x1`, `1_000`, digits of other scripts, `1,5`, `nan` and `inf` are refused.
- `reward.json`: a flat object of numbers, or one number (read as `{"reward": x}`). `true` and `false` count as
  1 and 0, as Harbor reads them; strings, null, nested values, keys written twice, NaN and Infinity are refused.
- A number too large for a float (`1e309`) is refused, not infinite. An empty file is malformed; `reward_missing`
  means that there is no file.

The primary reward is `reward`, else the only key, else the job's `reward_key`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from rollcage.rollout.outcome import Evidence, VerifierError
from rollcage.rollout.task import Step, Task
from rollcage.rollout.trajectory import Reward

REWARD_BYTES = 1 << 20
"""More than this is no reward: public tasks write some tens of keys, a few hundred bytes."""

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_SHOWN = 120


def read_reward(txt: bytes | None, json: bytes | None, *, reward_key: str | None = None) -> Reward:
    """The reward in the bytes of reward.txt and reward.json, None for a file that is not there.

    Raises `VerifierError`: `reward_missing` where both are None, `reward_malformed` otherwise.
    """
    if json is not None:
        values = _from_json(json)
        return Reward(_primary(values, reward_key), values, source="reward.json")
    if txt is not None:
        value = _from_txt(txt)
        return Reward(value, {"reward": value}, source="reward.txt")
    raise VerifierError("reward_missing", "the verifier left neither reward.txt nor reward.json")


def below_min_reward(reward: Reward, min_reward: float | Mapping[str, float] | None) -> str | None:
    """Why this reward does not reach a step's `min_reward`, or None where it does.

    A number is a floor for the primary reward, a table one for each of its keys; a key that the verifier did
    not write is below any floor.
    """
    if min_reward is None:
        return None
    if isinstance(min_reward, Mapping):
        for key, floor in min_reward.items():
            if key not in reward.values:
                return f"{key} is not in the reward, min_reward is {floor:g}"
            if reward.values[key] < floor:
                return f"{key} is {reward.values[key]:g}, below min_reward {floor:g}"
        return None
    if reward.value < min_reward:
        return f"reward is {reward.value:g}, below min_reward {min_reward:g}"
    return None


def combine_steps(task: Task, rewards: Sequence[tuple[Step, Reward]]) -> Reward:
    """One reward out of those of the steps that were verified, in the task's order.

    Strategy `mean`: each key's mean over the verified steps, a key that a step did not write counted as 0;
    the steps that were skipped are not in the mean (as in Harbor), and are listed. `final`: the reward of the
    last step that ran. A task of one step keeps its reward. Raises `ValueError` where there is no reward.
    """
    if not rewards:
        raise ValueError("there is no reward to combine")
    each = [reward for _, reward in rewards]
    if len(task.steps) == 1:
        return each[0]
    combined = each[-1]
    if task.multi_step_reward_strategy == "mean":
        keys = dict.fromkeys(key for reward in each for key in reward.values)
        combined = replace(
            combined,
            value=_mean([reward.value for reward in each]),
            values={key: _mean([reward.values.get(key, 0.0) for reward in each]) for key in keys},
            source="mean of steps",
        )
    ran = {step.name for step, _ in rewards}
    return replace(
        combined,
        test_ids=tuple(test_id for reward in each for test_id in reward.test_ids),
        steps=tuple((step.name, reward.value) for step, reward in rewards),
        skipped_steps=tuple(step.name for step in task.steps if step.name not in ran),
    )


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _from_txt(data: bytes) -> float:
    _check_size("reward.txt", data)
    text = data.decode("utf-8", "replace").strip(" \t\r\n\v\f")
    if not text:
        _malformed("reward.txt is empty")
    if not _NUMBER.fullmatch(text):
        _malformed(f"reward.txt is not one decimal number: {_shown(text)}")
    return _finite("reward.txt", float(text), text)


def _from_json(data: bytes) -> dict[str, float]:
    _check_size("reward.json", data)
    if not data.strip():
        _malformed("reward.json is empty")
    try:
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        _malformed(f"reward.json is not JSON: {_shown(str(error))}")
    if not isinstance(found, dict):
        found = {"reward": found}
    if not found:
        _malformed("reward.json has no keys")
    return {key: _json_number(key, value) for key, value in found.items()}


def _json_number(key: str, value: Any) -> float:
    if not isinstance(value, int | float):
        kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}
        kind = kinds.get(type(value), "null")
        _malformed(f"reward.json: {_shown(key)} is {kind}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return _finite(f"reward.json: {_shown(key)}", number, str(number))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            _malformed(f"reward.json has the key {_shown(key)} twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    _malformed(f"reward.json holds {name}, which is not a finite number")


def _primary(values: Mapping[str, float], reward_key: str | None) -> float:
    if "reward" in values:
        return values["reward"]
    if len(values) == 1:
        return next(iter(values.values()))
    if reward_key is not None and reward_key in values:
        return values[reward_key]
    wanted = "reward_key names none of them" if reward_key else "no reward_key is set"
    _malformed(f"reward.json has no key 'reward', and {wanted}: {_shown(', '.join(values))}")


def _finite(where: str, value: float, text: str) -> float:
    if not math.isfinite(value):
        _malformed(f"{where} is not a finite number: {_shown(text)}")
    return value


def _check_size(name: str, data: bytes) -> None:
    if len(data) > REWARD_BYTES:
        _malformed(f"{name} is {len(data)} bytes long, which is no reward")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _malformed(message: str) -> NoReturn:
    raise VerifierError("reward_malformed", message, Evidence(message, said_by="verifier"))
