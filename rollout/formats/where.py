"""`--where`: a small language of tests over a rollout's columns, computed by `pyarrow.compute`. Nothing is evaluated.

    outcome = 'passed' and completion_tokens <= 4000
    error_class is null or not (error_class in ('agent_timeout', 'turn_limit'))
    task like 'git-%' and phases.agent < 60 and len(segments) = 1

SQL's words and meaning: `= != < <= > >=`, `in`, `like` (`%` and `_`), `is null`, `not`, `and`, `or`, texts in single
quotes (`''` is one quote), numbers, `true`, `false`. A test with something that is null is neither true nor false,
and a row is kept where the whole is true. `len(column)` counts the entries of a list, the characters of a text.
Names are those of `schema.FIELDS["rollouts"]`; a struct's field is `struct.field`. A text beside a time is a time in
ISO 8601.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from rollcage.rollout.schema import FIELDS, TIME, VOCABULARY, Field

_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)|(?P<text>'(?:[^']|'')*')"
    r"|(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)|(?P<sign><=|>=|!=|<>|==|[=<>(),]))"
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_WORDS = frozenset(("and", "or", "not", "in", "like", "is", "null", "true", "false"))
DEPTH = 50
"""How deep parentheses and `not` may be nested."""

_Column = Any
"""A `pa.ChunkedArray`, or a `pa.Scalar` of a literal."""
_Value = Callable[[pa.Table], _Column]


class WhereError(ValueError):
    """The expression can't be used; the message shows the place in it."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    place: int


@dataclass(frozen=True)
class _Operand:
    """`kind` is text, number, boolean, time, or another type's name, which can only be counted or be null."""

    kind: str
    value: _Value
    said: str
    place: int
    literal: Any = None
    words: tuple[str, ...] = ()


class Where:
    """A test that rows of `schema.ROLLOUTS` pass or not. Raises `WhereError` for what can't be read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.columns: set[str] = set()
        """The columns that it looks at."""
        self._tokens = self._split()
        self._next = 0
        self._depth = 0
        self._test = self._or()
        if self._peek().kind != "end":
            self._refuse("something else was expected here: `and`, `or` or the end", self._peek().place)

    def keep(self, table: pa.Table) -> pa.Table:
        """The rows of `table` for which it is true, in their order."""
        mask = pc.fill_null(self._test(table), False)
        if isinstance(mask, pa.Scalar):
            return table if mask.as_py() else table.slice(0, 0)
        return table.filter(mask)

    def _split(self) -> list[_Token]:
        tokens = []
        place = 0
        while self.text[place:].strip():
            match = _TOKEN.match(self.text, place)
            if match is None:
                at = place + len(self.text[place:]) - len(self.text[place:].lstrip())
                quote = " (a text needs a second single quote)" if self.text[at] == "'" else ""
                hint = " (texts are in single quotes)" if self.text[at] == '"' else quote
                self._refuse(f"this can't be read{hint}", at)
            kind = match.lastgroup or ""
            tokens.append(_Token(kind, match[kind], match.start(kind)))
            place = match.end()
        return [*tokens, _Token("end", "", len(self.text.rstrip()))]

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._peek()
        self._next += token.kind != "end"
        return token

    def _is(self, *words: str) -> bool:
        """Whether the next token is one of these words or signs; then it is taken."""
        token = self._peek()
        found = token.kind in ("name", "sign") and token.text.lower() in words
        self._next += found
        return found

    def _need(self, sign: str) -> None:
        if not self._is(sign):
            self._refuse(f"`{sign}` was expected here", self._peek().place)

    def _or(self) -> _Value:
        test = self._and()
        while self._is("or"):
            test = _both(pc.or_kleene, test, self._and())
        return test

    def _and(self) -> _Value:
        test = self._not()
        while self._is("and"):
            test = _both(pc.and_kleene, test, self._not())
        return test

    def _not(self) -> _Value:
        self._depth += 1
        if self._depth > DEPTH:
            self._refuse(f"nested deeper than {DEPTH}", self._peek().place)
        try:
            if self._is("not"):
                return _inverted(self._not())
            if self._is("("):
                test = self._or()
                self._need(")")
                return test
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> _Value:
        left = self._operand()
        token = self._peek()
        if self._is("is"):
            inverted = self._is("not")
            self._need("null")
            test = _applied(pc.is_null, left.value)
            return _inverted(test) if inverted else test
        inverted = self._is("not")
        if self._is("in"):
            test = self._in(left)
        elif self._is("like"):
            test = self._like(left)
        elif inverted:
            self._refuse("`in` or `like` was expected here", self._peek().place)
        elif token.kind == "sign" and token.text in _COMPARE:
            self._take()
            right = self._operand()
            self._check_comparable(left, right, token)
            return _both(_COMPARE[token.text], _timed(left, right, self), _timed(right, left, self))
        elif left.kind == "boolean":
            return left.value
        else:
            self._refuse(f"a comparison was expected here, with {left.said}", token.place)
        return _inverted(test) if inverted else test

    def _in(self, left: _Operand) -> _Value:
        self._need("(")
        values = [self._literal()]
        while self._is(","):
            values.append(self._literal())
        self._need(")")
        for value in values:
            self._check_comparable(left, value, None)
        compared = [_both(pc.equal, left.value, _timed(value, left, self)) for value in values]
        test = compared[0]
        for other in compared[1:]:
            test = _both(pc.or_kleene, test, other)
        return test

    def _like(self, left: _Operand) -> _Value:
        pattern = self._literal()
        if left.kind != "text" or pattern.kind != "text":
            self._refuse("`like` is for texts", (left if left.kind != "text" else pattern).place)
        return _applied(lambda column: pc.match_like(column, pattern=pattern.literal), left.value)

    def _check_comparable(self, left: _Operand, right: _Operand, sign: _Token | None) -> None:
        kinds = {left.kind, right.kind}
        if not kinds <= {"text", "number", "boolean", "time"}:
            odd = left if left.kind not in ("text", "number", "boolean", "time") else right
            self._refuse(f"{odd.said} can't be compared; `len()` or `is null` can be asked", odd.place)
        literal_time = kinds == {"time", "text"} and (left.literal or right.literal) is not None
        if len(kinds) > 1 and not literal_time:
            self._refuse(f"{left.said} can't be compared with {right.said}", right.place)
        if "boolean" in kinds and sign is not None and sign.text not in ("=", "==", "!=", "<>"):
            self._refuse("true and false have no order", sign.place)
        for words, other in ((left.words, right), (right.words, left)):
            if words and other.literal is not None and other.literal not in words:
                self._refuse(f"{other.said} is none of its values: {', '.join(words)}", other.place)

    def _operand(self) -> _Operand:
        token = self._peek()
        if token.kind == "name" and token.text.lower() not in _WORDS:
            self._take()
            if token.text.lower() == "len" and self._is("("):
                return self._length(token)
            return self._column(token)
        return self._literal()

    def _length(self, token: _Token) -> _Operand:
        name = self._take()
        if name.kind != "name":
            self._refuse("the name of a column was expected here", name.place)
        column = self._column(name)
        self._need(")")
        if column.kind == "text":
            return _Operand("number", _applied(pc.utf8_length, column.value), "a length", token.place)
        if column.kind == "list":
            return _Operand("number", _applied(pc.list_value_length, column.value), "a length", token.place)
        self._refuse(f"`len` is for texts and lists, not {column.said}", name.place)

    def _column(self, token: _Token) -> _Operand:
        fields: Sequence[Field] = FIELDS["rollouts"]
        column, *path = token.text.split(".")
        found: Field | None = None
        for depth, name in enumerate((column, *path)):
            found = next((field for field in fields if field.name == name), None)
            if found is None:
                self._no_column(".".join((column, *path)[:depth]), name, fields, token)
            fields = found.children if pa.types.is_struct(found.type) else ()
        assert found is not None, "a name has a first part"
        self.columns.add(column)
        kind = _kind(found.type)
        said = f"`{token.text}` ({'a list' if kind == 'list' else kind})"
        words = VOCABULARY.get(token.text, ())
        return _Operand(kind, lambda table: _read(table, column, path), said, token.place, words=words)

    def _no_column(self, within: str, name: str, fields: Sequence[Field], token: _Token) -> NoReturn:
        names = [field.name for field in fields]
        near = difflib.get_close_matches(name, names, 1)
        meant = f" (`{near[0]}`?)" if near else ""
        what = f"`{within}` has no field `{name}`" if within else f"there is no column `{name}`"
        listed = f"; there are: {', '.join(names)}" if names else ""
        self._refuse(f"{what}{meant}{listed}", token.place)

    def _literal(self) -> _Operand:
        token = self._take()
        if token.kind == "text":
            text = token.text[1:-1].replace("''", "'")
            return _literal("text", text, f"the text {token.text}", token.place)
        if token.kind == "number":
            whole = re.fullmatch(r"-?\d+", token.text) is not None
            number = int(token.text) if whole and abs(int(token.text)) < 2**63 else float(token.text)
            return _literal("number", number, f"the number {token.text}", token.place)
        if token.kind == "name" and token.text.lower() in ("true", "false"):
            return _literal("boolean", token.text.lower() == "true", token.text, token.place)
        if token.kind == "name" and token.text.lower() == "null":
            self._refuse("nothing equals null; write `is null` or `is not null`", token.place)
        what = "a value was expected here: a text in single quotes, a number, true or false"
        self._refuse(what if token.kind != "end" else f"the expression ends too early: {what}", token.place)

    def _refuse(self, why: str, place: int) -> NoReturn:
        line = "".join(" " if character.isspace() else character for character in self.text)
        raise WhereError(f"{why}\n    {line}\n    {' ' * place}^")


def _literal(kind: str, value: Any, said: str, place: int) -> _Operand:
    scalar = pa.scalar(value, pa.large_string() if kind == "text" else None)
    return _Operand(kind, lambda _table: scalar, said, place, literal=value)


def _timed(operand: _Operand, other: _Operand, where: Where) -> _Value:
    """The operand's value; of a text that stands beside a time, that time."""
    if operand.kind != "text" or other.kind != "time":
        return operand.value
    try:
        time = datetime.fromisoformat(operand.literal)
    except ValueError:
        where._refuse(f"{operand.said} is no time, such as '2026-01-31T12:00:00Z'", operand.place)
    scalar = pa.scalar(time if time.tzinfo else time.replace(tzinfo=UTC), TIME)
    return lambda _table: scalar


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind) or pa.types.is_large_string(kind) or pa.types.is_string(kind):
        return "text"
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if pa.types.is_timestamp(kind):
        return "time"
    return "list" if pa.types.is_list(kind) else "a struct"


def _read(table: pa.Table, column: str, path: Sequence[str]) -> _Column:
    values = table[column]
    if pa.types.is_dictionary(values.type):
        values = pc.cast(values, pa.large_string())
    return pc.struct_field(values, list(path)) if path else values


def _applied(function: Callable[[_Column], _Column], value: _Value) -> _Value:
    return lambda table: function(value(table))


def _both(function: Callable[[_Column, _Column], _Column], left: _Value, right: _Value) -> _Value:
    return lambda table: function(left(table), right(table))


def _inverted(test: _Value) -> _Value:
    return lambda table: pc.invert(test(table))
