"""What is asked of a tokenizer, and where one comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    added_tokens_decoder: Mapping[int, Any]
    """Added tokens by id; each has `content` and `special`."""
    chat_template: Any

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a model directory or name. Takes seconds: transformers is imported here."""
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(str(path))
    return tokenizer
