"""Reading answers of terminus-2's XML protocol, which is tags around plain text: nothing in them is escaped.

    <response><analysis>...</analysis><plan>...</plan><commands>
    <keystrokes duration="0.1">ls
    </keystrokes></commands><task_complete>false</task_complete></response>

Warnings and errors are those of `keys_parser`, in the words of tags.
"""

from __future__ import annotations

import re

from rollcage.rollout.agents.keys_parser import DURATION_SEC, Answer, Keystrokes, MalformedAnswer, runs_on

SECTIONS = ("analysis", "plan", "commands", "task_complete")
REQUIRED = SECTIONS[:3]
OPEN, CLOSE = "<response>", "</response>"

_KEYSTROKES = re.compile(r"<keystrokes([^>]*)>")
_ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*("[^"]*"|'[^']*'|[^"'\s>]+)""")
_DONE = re.compile(r"<task_complete>\s*true\s*</task_complete>", re.IGNORECASE)
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&apos;": "'"}


def parse_xml(text: str, *, cut: bool = False) -> Answer:
    """What an answer asks for; `cut`: it was cut off at the token limit. Raises `MalformedAnswer`."""
    start = text.find(OPEN)
    if start < 0:
        raise MalformedAnswer("No <response> tag found")
    end = text.find(CLOSE, start)
    warnings = _around(text, start, end)
    if end < 0 and cut:
        raise MalformedAnswer("The <response> is not closed", warnings)
    content = text[start + len(OPEN) : len(text) if end < 0 else end].strip()
    if not content:
        raise MalformedAnswer("The <response> is empty", warnings)
    done = bool(_DONE.search(content))
    commands = _sections(content, warnings)
    if commands is None and not done:
        raise MalformedAnswer("Missing <commands> section", warnings)
    if commands == "" and not done:
        warnings.append(
            'Commands section is empty; nothing was typed. To wait, send <keystrokes duration="10.0"></keystrokes>.'
        )
    return Answer(_commands(commands or "", warnings), done, tuple(warnings))


def _around(text: str, start: int, end: int) -> list[str]:
    warnings = []
    if text[:start].strip():
        warnings.append("Extra text detected before <response> tag")
    if end < 0:
        warnings.append(
            "AUTO-CORRECTED: Missing </response> tag was inserted - please fix this in future responses"
        )
    elif text[end + len(CLOSE) :].strip():
        warnings.append("Extra text detected after </response> tag")
        if (count := text.count(OPEN)) > 1:
            warnings.append(_one_at_a_time("response", count))
    return warnings


def _sections(content: str, warnings: list[str]) -> str | None:
    """What the commands' section holds, None where there is none; the others are only looked at."""
    found = {name: _section(content, name) for name in SECTIONS}
    warnings += [f"Missing <{name}> section" for name in REQUIRED if found[name] is None]
    for tag in _tags_between(content, [place for place in found.values() if place]):
        if tag not in SECTIONS:
            warnings.append(f"Unknown tag found: <{tag}>, expected {'/'.join(SECTIONS)}")
    for name in SECTIONS:
        if (count := len(re.findall(rf"<{name}(?:\s|>|/>)", content))) > 1:
            once = f"Multiple <{name}> sections found"
            warnings.append(_one_at_a_time(name, count) if name == "commands" else once)
    places = {name: place[0] for name in REQUIRED if (place := found[name]) is not None}
    order, expected = sorted(places, key=lambda name: places[name]), list(places)
    if order != expected:
        warnings.append(
            f"Sections appear in wrong order. Found: {' → '.join(order)}, expected: {' → '.join(expected)}"
        )
    commands = found["commands"]
    return None if commands is None else commands[2]


def _section(content: str, name: str) -> tuple[int, int, str] | None:
    """Where a section begins and ends, and what it holds."""
    start = content.find(opening := f"<{name}>")
    if start >= 0 and (end := content.find(closing := f"</{name}>", start)) >= 0:
        return start, end + len(closing), content[start + len(opening) : end].strip()
    empty = re.search(rf"<{name}\s*/>", content)
    return None if empty is None else (empty.start(), empty.end(), "")


def _tags_between(content: str, sections: list[tuple[int, int, str]]) -> list[str]:
    """Names of tags outside of the sections."""
    at, tags = 0, dict[str, None]()
    for start, end, _ in [*sorted(sections), (len(content), 0, "")]:
        tags.update(dict.fromkeys(re.findall(r"<(\w+)[^<>]*>", content[at:start])))
        at = max(at, end)
    return list(tags)


def _commands(content: str, warnings: list[str]) -> tuple[Keystrokes, ...]:
    found = _typed(content)
    commands = []
    for number, (attributes, keys) in enumerate(found, 1):
        seconds = _duration(number, attributes, warnings)
        if number < len(found):
            warnings += runs_on(number, keys)
        commands.append(Keystrokes(keys, seconds))
    for entity, character in _ENTITIES.items():
        if entity in content:
            warnings.append(f"Warning: {entity} is typed as it stands, not as {character}: write {character}")
    if "\\r\\n" in content:
        warnings.append("Warning: \\r\\n is typed as it stands: end a line with a newline")
    return tuple(commands)


def _typed(content: str) -> list[tuple[str, str]]:
    """Attributes and text of each `keystrokes` that is closed."""
    found, at = [], 0
    while opening := _KEYSTROKES.search(content, at):
        end = content.find("</keystrokes>", opening.end())
        if end < 0:
            break
        found.append((opening[1], content[opening.end() : end]))
        at = end
    return found


def _duration(number: int, attributes: str, warnings: list[str]) -> float:
    seconds = None
    for name, value in _ATTRIBUTE.findall(attributes):
        plain = value.strip("\"'")
        if value[0] not in "\"'":
            warnings.append(
                f"Command {number}: Attribute '{name}' value should be quoted: {name}=\"{plain}\""
            )
        elif value[0] == "'":
            warnings.append(f"Command {number}: Use double quotes for attribute '{name}': {name}=\"{plain}\"")
        if name != "duration":
            warnings.append(f"Command {number}: Unknown attribute '{name}' - known attributes are: duration")
        elif value[0] in "\"'" and seconds is None:
            seconds = _seconds(plain)
            if seconds is None:
                wrong = f"Invalid duration value '{plain}'"
                warnings.append(f"Command {number}: {wrong}, using default {DURATION_SEC}")
                seconds = DURATION_SEC
    if seconds is None:
        warnings.append(f"Command {number}: Missing duration attribute, using default {DURATION_SEC}")
        return DURATION_SEC
    return seconds


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return max(0.0, seconds) if seconds == seconds else None


def _one_at_a_time(tag: str, count: int) -> str:
    return f"IMPORTANT: Only issue one <{tag}> block at a time. You issued {count} and only the first was executed."
