"""Words of a Dockerfile, read and written: quotes, escapes and variables by the rules of BuildKit's lexer.

The rules look like a shell's and are not: `$x`, `${x}`, `${x:-d}`, `${x-d}`, `${x:+a}`, `${x:?e}`, `${x#p}`,
`${x%p}` and `${x/p/r}` are known, an unset variable is empty, and inside double quotes an escape holds only
before `"`, `$` and itself. Text that breaks them raises `WordError`.

https://docs.docker.com/reference/dockerfile/#environment-replacement
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

CLASSIC_LACKS = re.compile(r"\$\{\w+(?:[#%/]|[-+?])")
"""Substitutions that BuildKit knows and the classic builder of Engine 20.10 does not."""

LINE_CHARS = 15_000
"""The classic builder takes 64 KiB in one line of a Dockerfile; a character is 4 bytes at most."""


MOST_CHARS = 1 << 20
"""What the variables of one text may become: one that stands twice in the next doubles with every line."""

MOST_PATTERN_CHARS = 10_000
"""A value to which a pattern is put, in time that grows with its square."""

MOST_NESTED = 50


class WordError(ValueError):
    """The text cannot be read as words."""


def expand(text: str, env: Mapping[str, str], *, escape: str = "\\") -> str:
    """One word after quotes, escapes and variables: what the builder makes of an argument."""
    return _Lexer(text, env, escape).run()[0]


def expand_body(text: str, env: Mapping[str, str]) -> str:
    """An unquoted heredoc's body in COPY and ADD: variables and escapes, quotes as they are. The escape is a
    backslash whatever the Dockerfile's own is."""
    return _Lexer(text, env, "\\", quotes=False).run()[0]


def split_raw(text: str) -> list[str]:
    """The words of a line with quotes, escapes and variables kept as written; this finds heredocs."""
    return _Lexer(text, {}, "\\", raw=True).run()[1]


def unquoted(word: str) -> tuple[str, bool]:
    """A heredoc's delimiter without its quotes, and whether it had any."""
    plain = _Lexer(word, {}, "\\", keep_unset=True).run()[1]
    raw = _Lexer(word, {}, "\\", keep_unset=True, raw_quotes=True).run()[1]
    if len(plain) != 1 or len(raw) != 1:
        raise WordError(f"{word!r} is not one word")

    def quotes(text: str) -> int:
        return text.count("'") + text.count('"')

    return plain[0], quotes(plain[0]) != quotes(raw[0])


def array(words: Sequence[str], escape: str) -> str:
    """A JSON array for a Dockerfile, in which each line of a word stands on a line of its own."""
    return "[" + ", ".join(_string(word, escape) for word in words) + "]"


def literal(text: str, escape: str) -> str:
    """A word that the builder reads as exactly this text; wildcards stay wildcards."""
    return re.sub(rf"([$'\"{re.escape(escape)}])", lambda found: escape + found[0], text)


def quoted(text: str, escape: str) -> str:
    """The text in double quotes."""
    return '"' + re.sub(rf"([$\"{re.escape(escape)}])", lambda found: escape + found[0], text) + '"'


def on_lines(text: str, escape: str) -> str:
    """A long instruction on several lines."""
    if len(text) < LINE_CHARS:
        return text
    return re.sub(r"(.{1000,7000}?[A-Za-z0-9])(?=[A-Za-z0-9])", rf"\1{re.escape(escape)}\n", text)


class _Lexer:
    """Reads `text` once. `raw` keeps quotes, escapes and unknown variables as they are written."""

    def __init__(
        self,
        text: str,
        env: Mapping[str, str],
        escape: str,
        *,
        quotes: bool = True,
        raw: bool = False,
        keep_unset: bool = False,
        raw_quotes: bool = False,
    ) -> None:
        self.text = text
        self.env = env
        self.escape = escape
        self.quotes = quotes
        self.raw_quotes = raw or raw_quotes
        self.raw_escapes = raw
        self.keep_unset = raw or keep_unset
        self.at = 0
        self.grown = 0
        self.nested = 0

    def run(self, stop: str = "", raw_escapes: bool | None = None) -> tuple[str, list[str]]:
        """(the text as one word, the same split into words), up to `stop`, which is consumed."""
        outer, self.raw_escapes = self.raw_escapes, self.raw_escapes if raw_escapes is None else raw_escapes
        result: list[str] = []
        words: list[str] = []
        word = ""
        while char := self._peek():
            if char == stop:
                self.at += 1
                self.raw_escapes = outer
                return "".join(result), [*words, word] if word else words
            if char == "$":
                piece = self._dollar()
                for part in re.split(r"(\s+)", piece):
                    if part.isspace():
                        words, word = ([*words, word] if word else words), ""
                    else:
                        word += part
            elif char == "<":
                piece = self._heredoc_sign()
                word += piece
            elif self.quotes and char in "'\"":
                piece = self._single() if char == "'" else self._double()
                word += piece
            elif char == self.escape:
                self.at += 1
                piece = (char if self.raw_escapes else "") + self._take()
                word += piece
            else:
                piece = self._take()
                if piece.isspace():
                    words, word = ([*words, word] if word else words), ""
                else:
                    word += piece
            result.append(piece)
        if stop:
            raise WordError(f"the text ends where a {stop!r} is missing")
        return "".join(result), [*words, word] if word else words

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self) -> str:
        char = self._peek()
        self.at += len(char)
        return char

    def _heredoc_sign(self) -> str:
        match = re.compile(r"<<[\t\r ]*|<").match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        return match.group()

    def _single(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise WordError("a single quote is not closed")
        piece = self.text[self.at : end + 1]
        self.at = end + 1
        return piece if self.raw_quotes else piece[1:-1]

    def _double(self) -> str:
        quote = self._take() if self.raw_quotes else ""
        self.at += 0 if self.raw_quotes else 1
        result = [quote]
        while char := self._peek():
            if char == '"':
                self.at += 1
                return "".join([*result, quote])
            if char == "$":
                result.append(self._dollar())
                continue
            self.at += 1
            if char == self.escape:
                if self.raw_escapes:
                    result.append(char)
                if self._peek() in ('"', "$", self.escape):
                    char = self._take()
                elif not self._peek() or self.raw_escapes:
                    continue
            result.append(char)
        raise WordError("a double quote is not closed")

    def _name(self) -> str:
        match = re.compile(r"[0-9]+|[@*#?\-$!]|\w+").match(self.text, self.at)
        name = match.group() if match else ""
        self.at += len(name)
        return name

    def _dollar(self) -> str:
        piece = self._variable()
        self.grown += len(piece)
        if self.grown > MOST_CHARS:
            raise WordError(f"its variables become more than {MOST_CHARS >> 20} MiB of text")
        return piece

    def _variable(self) -> str:
        self.at += 1
        if self._peek() != "{":
            name = self._name()
            if not name or (name not in self.env and self.keep_unset):
                return "$" + name
            return self.env.get(name, "")
        self.at += 1
        if self._peek() in ("", "{", "}", ":"):
            raise WordError("bad substitution after ${" if self._peek() else "a '}' is missing")
        name = self._name()
        sign = self._take()
        value = self.env.get(name)
        if sign == "}":
            return f"${{{name}}}" if value is None and self.keep_unset else value or ""
        if sign == "/":
            return self._replaced(name, value)
        null_is_unset = sign == ":"
        if null_is_unset:
            sign = self._take()
        if not sign or sign not in "+-?#%" or (null_is_unset and sign in "#%"):
            raise WordError(f"${{{name}{':' if null_is_unset else ''}{sign}...}} is not a known substitution")
        self.nested += 1
        if self.nested > MOST_NESTED:
            raise WordError(f"substitutions are nested more than {MOST_NESTED} deep")
        word, _ = self.run("}", raw_escapes=sign in "#%")
        self.nested -= 1
        if sign in "#%":
            _bounded(value)
        if value is None and self.keep_unset:
            return f"${{{name}{':' if null_is_unset else ''}{sign}{word}}}"
        unset = value is None or (null_is_unset and not value)
        match sign:
            case "-":
                return word if unset else value or ""
            case "+":
                return "" if unset else word
            case "?":
                if unset:
                    raise WordError(f"{name}: {word or 'must be set'}")
                return value or ""
            case _:
                return _trimmed(value or "", word, suffix=sign == "%")

    def _replaced(self, name: str, value: str | None) -> str:
        every = self._peek() == "/"
        self.at += every
        pattern, _ = self.run("/", raw_escapes=True)
        replacement, _ = self.run("}", raw_escapes=True)
        _bounded(value)
        if value is None:
            return f"${{{name}/{pattern}/{replacement}}}" if self.keep_unset else ""
        return re.sub(_pattern(pattern), lambda _: replacement, value, count=0 if every else 1)


def _bounded(value: str | None) -> None:
    if value is not None and len(value) > MOST_PATTERN_CHARS:
        raise WordError(f"a pattern is put to a value of more than {MOST_PATTERN_CHARS} characters")


def _trimmed(value: str, word: str, *, suffix: bool) -> str:
    sign = "%" if suffix else "#"
    longest = word.startswith(sign)
    pattern = re.compile(_pattern(word.removeprefix(sign)))
    lengths = range(len(value) + 1)
    for length in reversed(lengths) if longest else lengths:
        kept = len(value) - length
        if pattern.fullmatch(value[kept:] if suffix else value[:length]):
            return value[:kept] if suffix else value[length:]
    return value


def _pattern(text: str) -> str:
    """A substitution's pattern as a regular expression: `*` and `?` are special, a backslash escapes."""
    pieces = re.findall(r"\\.|[^\\]|\\$", text)
    special = {"*": ".*", "?": "."}
    return "".join(special.get(piece, re.escape(piece[1:] if len(piece) == 2 else piece)) for piece in pieces)


def _string(word: str, escape: str) -> str:
    if "\n" not in word and len(word) < LINE_CHARS:
        return json.dumps(word, ensure_ascii=False)
    pieces = [_piece(line, escape) for line in word.split("\n")]
    return f'"{escape}\n' + f"\\n{escape}\n".join(pieces) + '"'


def _piece(line: str, escape: str) -> str:
    """A line inside a JSON string, continued as often as its length asks. A piece must not begin like a
    comment, which the builder would drop, nor end in the escape, which would stop the line from going on."""
    step = LINE_CHARS // 2
    pieces = []
    for start in range(0, max(len(line), 1), step):
        text = line[start : start + step]
        last = text[-1:] if text[-1:] in ("\\", "`") else ""
        encoded = json.dumps(text.removesuffix(last), ensure_ascii=False)[1:-1]
        if text.lstrip().startswith("#"):
            encoded = encoded.replace("#", "\\u0023", 1)
        pieces.append(encoded + (f"\\u{ord(last):04x}" if last else ""))
    return f"{escape}\n".join(pieces)
