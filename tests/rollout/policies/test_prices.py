"""What answers cost, by the prices that are known."""

from __future__ import annotations

import pytest

from rollcage.rollout.policies.prices import Prices, Usage, known_prices

EACH = Usage(input=1_000_000, output=1_000_000, cache_write=1_000_000, cache_read=1_000_000)


@pytest.mark.parametrize(
    ("model", "dollars"),
    [
        ("claude-opus-5-5", 4 + 20 + 5 + 0.2),
        ("claude-opus-5", 5 + 25 + 6.25 + 0.5),
        ("claude-sonnet-5-5", 2 + 10 + 2.5 + 0.1),
        ("claude-sonnet-4-5-20250929", 3 + 15 + 3.75 + 0.3),
        ("claude-haiku-4-5@20251001", 1 + 5 + 1.25 + 0.1),
        ("anthropic/claude-fable-5-1", 10 + 50 + 12.5 + 0.25),
        ("claude-3-5-haiku-latest", 0.8 + 4 + 1 + 0.08),
    ],
)
def test_a_model_is_known_with_and_without_its_date(model: str, dollars: float) -> None:
    prices = known_prices(model)
    assert prices is not None
    assert prices.cost(EACH) == pytest.approx(dollars)


@pytest.mark.parametrize(
    "model", ["claude-opus-5-6", "claude-fable-5-2", "claude", "", "gpt-6", "claude-opus-5-fast"]
)
def test_the_price_of_one_model_is_not_taken_for_anothers(model: str) -> None:
    assert known_prices(model) is None


def test_a_long_prompt_has_its_own_price_for_all_of_its_tokens() -> None:
    prices = known_prices("claude-haiku-5-5")
    assert prices is not None
    assert prices.cost(Usage(input=60_000, cache_read=40_000, output=1000)) == pytest.approx(
        (60_000 * 0.1 + 40_000 * 0.01 + 1000 * 0.5) / 1e6
    )
    assert prices.cost(Usage(input=60_001, cache_read=40_000, output=1000)) == pytest.approx(
        (60_001 * 0.5 + 40_000 * 0.05 + 1000 * 2.5) / 1e6
    )


def test_prices_of_the_users_own() -> None:
    assert Prices(1, 2).cost(EACH) == pytest.approx(1 + 2 + 1.25 + 0.1)
    assert Prices(1, 2, cache_write=0, cache_read=1).cost(EACH) == pytest.approx(1 + 2 + 0 + 1)
