"""Jinja for chat templates, in a sandbox that bounds work and size: a template comes with a checkpoint.

What templates see follows transformers' `apply_chat_template`; the bounds are ours. Work is counted in
loop passes, calls, filters, and what these are given and give back; sizes in characters and items.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, partial, wraps
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 2**20
_WORK, _SIZE = 500_000, 2**19
_MOST_BITS = 4096
_CALL = 10  # steps that a call costs
_STRING_SHIFT = 6  # characters that cost as much as one step: 64
_WIDTHS = re.compile(r"\d{5}|%[^a-zA-Z%]*\*")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "indent"})
# Filters that look at no more than a few items.
_FREE = frozenset({"length", "count", "first", "last", "default", "d", "items", "safe"})


class TemplateLimit(TemplateError):
    """A template does more than any conversation needs."""


class _Allowance:
    """What one rendering may still do."""

    def __init__(self, size: int, messages: int) -> None:
        self.most = _SIZE + 8 * size
        self.work = _WORK + size + 1000 * messages

    def spend(self, amount: int) -> None:
        self.work -= amount
        if self.work < 0:
            raise TemplateLimit("it loops or computes too much")

    def check(self, size: int) -> None:
        if size > self.most:
            raise TemplateLimit(f"it makes a text or list larger than {self.most:,}")


_allowance: ContextVar[_Allowance] = ContextVar("allowance")


def render(template: "CompiledTemplate", values: Mapping[str, Any]) -> str:
    """Render within bounds that grow with `values`.

    Raises:
        TemplateLimit: it goes beyond them. Exception: whatever else the template raises.
    """
    allowance = _Allowance(_weight(values, None), len(values.get("messages") or ()))
    token = _allowance.set(allowance)
    try:
        return template.template.render(**values)
    finally:
        _allowance.reset(token)


class CompiledTemplate:
    """A template's code, and the names that it reads without setting them."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateLimit(f"it has {len(source):,} characters, more than {MAX_SOURCE:,}")
        environment = _Environment()
        self.template = environment.from_string(source)
        names = find_undeclared_variables(environment.parse(source))
        self.variables = frozenset(names - environment.globals.keys())


@lru_cache(maxsize=8)
def compile_template(source: str) -> CompiledTemplate:
    """Compile a template.

    Raises:
        Exception: it is no valid Jinja, too deep or too long.
    """
    with warnings.catch_warnings():  # of Python about odd code, such as 5[1:]
        warnings.simplefilter("ignore")
        return CompiledTemplate(source)


def _weight(value: Any, most: int | None) -> int:
    """Characters and items in `value`, as often as they would be printed; counted up to `most`."""
    total, todo = 0, [value]
    while todo and (most is None or total <= most):
        one = todo.pop()
        total += len(one) if isinstance(one, str) else 1
        if isinstance(one, Mapping):
            todo.extend(one.keys())
            todo.extend(one.values())
        elif isinstance(one, list | tuple):
            todo.extend(one)
    return total


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    spend = _allowance.get().spend
    for value in values:
        spend(1 + (len(value) >> _STRING_SHIFT) if isinstance(value, str) else 1)
        yield value


def _paid(value: Any) -> Any:
    """Charge for something that an operation was given or gave back."""
    allowance = _allowance.get()
    if isinstance(value, str):
        allowance.check(len(value))
        allowance.spend(1 + (len(value) >> _STRING_SHIFT))
    elif isinstance(value, list | tuple | dict | range):
        allowance.check(len(value))
        allowance.spend(1 + len(value))
    elif isinstance(value, Iterator) and not isinstance(value, LoopContext):
        return _counted(value)
    else:
        allowance.spend(1)
    return value


def _weighed(value: Any) -> Any:
    """Refuse to keep what would be too large to print: lists of lists of the same list."""
    if isinstance(value, list | tuple | dict):
        allowance = _allowance.get()
        weight = _weight(value, allowance.most)
        allowance.check(weight)
        allowance.spend(weight >> _STRING_SHIFT)
    return value


def _check_growth(name: str, subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an operation on text whose result would be too large, before it is made.

    Args:
        name: of a filter, or of a method of strings; `subject` is what it works on.
    """
    allowance = _allowance.get()
    given = [*args, *kwargs.values()]
    if name == "replace" and len(given) >= 2:
        allowance.check(str(subject).count(str(given[0])) * len(str(given[1])))
    elif name == "join":
        for parts, separator in ((subject, given[:1]), *((one, [subject]) for one in given[:1])):
            if isinstance(parts, list | tuple | range):
                allowance.check(_weight(parts, allowance.most))
            if isinstance(parts, list | tuple | range | str) and separator:
                allowance.check(len(parts) * len(str(separator[0])))
    elif name in ("format", "format_map") and _WIDTHS.search(str(subject)):
        raise TemplateLimit("it pads a text to an enormous width")
    elif name == "translate":
        raise TemplateLimit("it calls translate")
    elif name in _PADDING:
        text = str(subject)
        widths = [abs(one) for one in given if isinstance(one, int)]
        allowance.check(max(widths, default=8) * (text.count("\n") + text.count("\t") + 1))
    elif name in ("format", "batch"):
        allowance.check(max((one for one in given if isinstance(one, int)), default=0))


def _paid_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def paid(*args: Any, **kwargs: Any) -> Any:
        rest = args[1:] if takes_context else args
        if name == "join" and isinstance(rest[0], Iterator):
            rest = ([_paid(one) for one in rest[0]], *rest[1:])
            args = (*args[:1], *rest) if takes_context else rest
        _check_growth(name, rest[0] if rest else None, rest[1:], kwargs)
        for arg in rest:
            _paid(arg)
        return _paid(function(*args, **kwargs))

    return paid


class _Bounding(NodeTransformer):
    """Makes loops, joined texts, comparisons, slices and assignments go through the functions above."""

    @staticmethod
    def _through(name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._through("_counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_paid", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._through("_paid", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        for side in sides:
            if not isinstance(side.expr, nodes.Const):
                side.expr = self._through("_paid", side.expr)
        return node

    def visit_Assign(self, node: nodes.Assign) -> nodes.Node:
        self.generic_visit(node)
        node.node = self._through("_weighed", node.node)
        return node

    def visit_With(self, node: nodes.With) -> nodes.Node:
        self.generic_visit(node)
        node.values = [self._through("_weighed", value) for value in node.values]
        return node


class _Generation(Extension):
    """`{% generation %}`, by which training finds the assistant's tokens. Here its content is printed."""

    tags = {"generation"}  # noqa: RUF012  # as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, LoopControlExtension],
            optimized=False,  # which would compute constants while it compiles
            cache_size=0,
        )
        # Jinja's own tojson escapes what HTML would read.
        found = {**self.filters, "tojson": partial(json.dumps, ensure_ascii=False)}
        self.filters = {
            name: function if name in _FREE else _paid_filter(name, function)
            for name, function in found.items()
        }
        del self.filters["wordwrap"], self.filters["urlize"]  # whose time is not that of their text
        self.filters |= {"_counted": _counted, "_paid": _paid, "_weighed": _weighed}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": lambda *args, **kwargs: dict(
                *args, **kwargs
            ),  # not the type, which has attributes
            "namespace": _Namespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def concat(self, pieces: Iterable[str]) -> str:
        allowance, kept, size = _allowance.get(), [], 0
        for piece in pieces:
            kept.append(piece)
            size += len(piece)
            allowance.check(size)
            allowance.spend(1 + (len(piece) >> _STRING_SHIFT))
        return "".join(kept)

    def call(self, context: Context, called: Any, *args: Any, **kwargs: Any) -> Any:
        _allowance.get().spend(_CALL)
        subject = getattr(getattr(called, "__wrapped__", called), "__self__", None)
        if isinstance(called, LoopContext) and args:  # a recursive loop goes down
            args = (_counted(args[0]), *args[1:])
        if isinstance(subject, str):
            _paid(subject)
        _check_growth(getattr(called, "__name__", ""), subject, args, kwargs)
        for arg in (*args, *kwargs.values()):
            _weighed(arg)
        return _paid(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        allowance = _allowance.get()
        texts = [side for side in (left, right) if isinstance(side, str | bytes | list | tuple)]
        if operator == "%" and isinstance(left, str) and _WIDTHS.search(left):
            raise TemplateLimit("it pads a text to an enormous width")
        if operator == "+" and len(texts) == 2:
            allowance.check(len(left) + len(right))
        if operator == "*" and texts:
            times = max(side for side in (left, right, 0) if isinstance(side, int))
            weight = max(_weight(texts[0], allowance.most), len(texts[0]))
            allowance.check(weight * times)
        elif operator in ("*", "**"):
            bits = [x.bit_length() for x in (left, right) if isinstance(x, int)]
            grown = sum(bits) if operator == "*" else bits[0] * abs(right) if len(bits) == 2 else 0
            if grown > _MOST_BITS:
                raise TemplateLimit("it computes with enormous numbers")
        return _paid(super().call_binop(context, operator, left, right))


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


class _Namespace(Namespace):
    """Without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # one of them may be called `self`
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name}")
