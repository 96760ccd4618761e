"""Finds which inputs of a traced model its lookups read, by table, so that a cache knows what to fetch.

`mark` names the keys of a lookup in the trace. `find_inputs` follows each input to those names, through operations that
pick and move whole keys. Any other operation on the words of a key makes an unknown key.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from jaxsok import guards
from jaxsok.keys import PADDING_WORD

_MARK = "jaxsok.keys:"


class Rows(frozenset[str]):
    """The label of an array of a store that holds rows of these tables."""


Label: TypeAlias = frozenset[str] | Rows | None
"""The inputs whose keys an array has, or padding; or the tables whose rows it has; None: other numbers."""

_PASS = frozenset({"name", "copy", "copy_p", "optimization_barrier", "sharding_constraint", "device_put"})
_CALLS = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "custom_vmap_call": "call",
}  # call operations, and the parameter that has their program
_LOOKUPS = frozenset({"ffi_call", "custom_call"})  # what may take the rows of a store


def mark(table: str, words: Any) -> Array:
    """Names the keys of a lookup in the trace, and gives them back."""
    return checkpoint_name(jnp.asarray(words), f"{_MARK}{table}")


def find_inputs(jaxpr: Any, labels: Sequence[Label], tables: Sequence[str]) -> dict[str, tuple[str, ...] | None]:
    """Finds the inputs by whose keys each table is looked up; None: the model computes keys, or reads other rows."""
    walk = _Walk(tables)
    walk.run(jaxpr.jaxpr, labels, jaxpr.consts)
    return {table: None if table in walk.unknown else tuple(sorted(walk.read[table])) for table in tables}


class _Walk:
    def __init__(self, tables: Sequence[str]) -> None:
        self.read: dict[str, set[str]] = {table: set() for table in tables}
        self.unknown: set[str] = set()

    def run(self, jaxpr: Any, labels: Sequence[Label], consts: Sequence[Any] = ()) -> list[Label]:
        """Labels the results of a program by the labels of its arguments."""
        env: dict[Any, Label] = dict(zip(jaxpr.invars, labels, strict=True))
        env |= {var: _label_constant(value) for var, value in zip(jaxpr.constvars, consts, strict=False)}
        by_lines: set[Any] = set()  # masks that are the same for both words of a key

        def label(var: Any) -> Label:
            return _label_constant(var.val) if hasattr(var, "val") else env.get(var)

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [label(var) for var in eqn.invars], by_lines)
            if eqn.primitive.name == "broadcast_in_dim":
                dims, last = eqn.params["broadcast_dimensions"], _last(eqn.outvars[0])
                if last not in dims or eqn.invars[0].aval.shape[dims.index(last)] == 1:
                    by_lines.add(eqn.outvars[0])
            env |= dict(zip(eqn.outvars, results, strict=True))
        return [label(var) for var in jaxpr.outvars]

    def _results(self, eqn: Any, labels: Sequence[Label], by_lines: set[Any]) -> Sequence[Label]:
        if eqn.primitive is guards.GUARD:
            return labels
        name, nothing = eqn.primitive.name, [None] * len(eqn.outvars)
        if name in _CALLS:
            inner = eqn.params.get(_CALLS[name])
            jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
            if jaxpr is not None and len(jaxpr.invars) == len(eqn.invars):
                return self.run(jaxpr, labels, consts)
        inner = list(_inner(eqn))  # of loops, branches, and what is not known here
        if inner or name not in _LOOKUPS:
            self.unknown.update(*(label for label in labels if isinstance(label, Rows)))
        for jaxpr in inner:
            self.run(jaxpr, [None] * len(jaxpr.invars))
        if inner:
            return nothing
        labels = [None if isinstance(label, Rows) else label for label in labels]
        if name == "name" and eqn.params["name"].startswith(_MARK):
            table = eqn.params["name"].removeprefix(_MARK)
            if labels[0] is None:
                self.unknown.add(table)
            else:
                self.read[table] |= labels[0]
        if name in _PASS:
            return labels
        if name == "select_n":
            is_by_key = eqn.invars[0].aval.ndim == 0 or eqn.invars[0] in by_lines
            return [_union(labels[1:])] if is_by_key else nothing
        if name in _JOINS:
            joined = _union(labels)
            return [joined if not joined or _JOINS[name](eqn) else None]
        keeps = _KEEPS.get(name)
        if keeps is None or labels[0] is None or (labels[0] and not keeps(eqn)):
            return nothing
        return [labels[0]] * len(eqn.outvars)


def _label_constant(value: Any) -> Label:
    value = np.asarray(value)
    return frozenset() if value.dtype == np.uint32 and (value == PADDING_WORD).all() else None


def _union(labels: Sequence[Label]) -> Label:
    known = [label for label in labels if label is not None]
    return frozenset().union(*known) if len(known) == len(labels) else None


def _last(var: Any) -> int:
    return var.aval.ndim - 1


def _has_words(eqn: Any) -> bool:
    """Checks that the last axis still holds the two words of a key."""
    return bool(eqn.outvars[0].aval.ndim) and eqn.outvars[0].aval.shape[-1] == 2


def _gathers_words(eqn: Any) -> bool:
    numbers, last = eqn.params["dimension_numbers"], _last(eqn.invars[0])
    moved = (*numbers.collapsed_slice_dims, *numbers.start_index_map, *numbers.operand_batching_dims)
    return (
        last not in moved
        and eqn.params["slice_sizes"][-1] == 2
        and numbers.offset_dims[-1:] == (_last(eqn.outvars[0]),)
        and eqn.params.get("fill_value") in (None, int(PADDING_WORD))  # what is outside reads padding
    )


# Operations, and a check that the two words of a key stay together.
_JOINS: Mapping[str, Callable[[Any], bool]] = {
    "concatenate": lambda eqn: eqn.params["dimension"] != _last(eqn.outvars[0]),
    "pad": lambda eqn: tuple(eqn.params["padding_config"][-1:]) == ((0, 0, 0),),
}
# Operations on keys, whose last axis is their two words, and a check that whole keys are picked or moved.
_KEEPS: Mapping[str, Callable[[Any], bool]] = {
    "reshape": lambda eqn: _has_words(eqn) and eqn.params["dimensions"] is None,
    "slice": _has_words,
    "dynamic_slice": _has_words,
    "squeeze": _has_words,
    "transpose": lambda eqn: eqn.params["permutation"][-1] == _last(eqn.invars[0]),
    "broadcast_in_dim": lambda eqn: eqn.params["broadcast_dimensions"][-1:] == (_last(eqn.outvars[0]),),
    "rev": lambda eqn: _last(eqn.invars[0]) not in eqn.params["dimensions"],
    "split": lambda eqn: eqn.params["axis"] != _last(eqn.invars[0]),
    "gather": _gathers_words,
}


def _inner(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield inner
