"""Optax transformations that treat rows alike, as sparse optimizers of rows; those that do not are refused.

`lift` looks at a transformation once, when it is declared: which leaves of its state have one entry per row, which are
the store's, and whether a row's step needs any other row (separable.py). The step of a row is the transformation's own
`update` on a table of that one row, so the formulas are Optax's.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jaxtyping import Array, Float

from jaxsok import checks
from jaxsok.optimizers import program, separable
from jaxsok.optimizers.protocol import Optimizer, RowInputs, RowOutputs, RowState
from jaxsok.optimizers.separable import Coupled
from jaxsok.types import MAX_DIM, MAX_STATES

if TYPE_CHECKING:
    import optax

# Row counts of the blocks on which a transformation is traced: primes, so that no other axis is as long.
_NUM_ROWS = (13, 17, 19)
# The size of a table in which factored state shows: Optax factors from 128 rows and 128 columns on.
_MANY_ROWS, _MANY_COLUMNS = 4099, MAX_DIM

# The dim of the table on which an optimizer is traced when it is declared; other dims follow when tables are declared.
_A_DIM = 8

_ACCUMULATING = (
    "a row that only an earlier micro-step used would lose its gradient",
    "Accumulate outside: give collection.update several plans and their gradients at once",
)
_DENIED = {
    "MultiStepsState": _ACCUMULATING,
    "ApplyEvery": _ACCUMULATING,
    "SAMState": (
        "a row that the second of its two gradients does not use would stay where the first one put it",
        "Use another optimizer",
    ),
    "LookaheadState": (
        "it needs fast and slow parameters of the whole table side by side",
        "Lift the fast optimizer alone",
    ),
    "AddNoiseState": (
        "its noise depends on the place of a row in the batch, and unused rows would get none",
        "Lift the transformation without the noise",
    ),
    "DifferentiallyPrivateAggregateState": (
        "it needs the gradient of every sample apart, and gives noise to all rows",
        "Use another optimizer",
    ),
    "ApplyIfFiniteState": (
        "whether one row steps would depend on the gradients of all",
        "Leave it out: Stats.num_nonfinite counts the rows whose gradients are not finite",
    ),
    "SophiaState": ("it needs the loss itself, to estimate its curvature", "Use another optimizer"),
    "HutchinsonState": ("it needs the loss itself, to estimate its curvature", "Use another optimizer"),
    "MuonState": ("it makes the columns of the whole table orthogonal", "Use another optimizer"),
    "ZeroNansState": (
        "it notes in one place whether any gradient of the table was NaN",
        "Lift optax.stateless_with_tree_map(lambda g, _: jnp.where(jnp.isnan(g), 0.0, g)), which does the same unnoted",
    ),
    "ScaleByLBFGSState": ("its step is made of products over the whole table", "Use another optimizer"),
}
"""Classes of Optax state that the tests of the update would misjudge or refuse less clearly: reason and remedy."""

_STARTED = "started"


def _refusal(reason: str, remedy: str) -> ValueError:
    return ValueError(f"optim.lift: refused: {reason}. {remedy}.")


@dataclasses.dataclass(frozen=True)
class _Leaf:
    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: Any
    is_row: bool
    """True if each row has its own; False: the store has one."""

    @property
    def place(self) -> str:
        """Its path as text, "[0].mu"."""
        return tree_util.keystr(self.path).lstrip(".") or "the state"


@dataclasses.dataclass(frozen=True)
class _Form:
    """The state of a transformation over rows of one dim, and how it lies in a store."""

    treedef: Any
    leaves: tuple[_Leaf, ...]
    state_specs: tuple[RowState, ...]
    copied: tuple[bool, ...]
    """True for each row leaf that begins as a function of the row, not as a number."""
    global_state: tuple[np.ndarray, ...]
    global_names: tuple[str | None, ...]
    """Their places; None: a number of `optax.inject_hyperparams` without a schedule, which is declared."""
    nodes: tuple[str, ...]
    rates: tuple[int, ...]
    """Which of `global_state` are declared learning rates."""

    @property
    def has_started(self) -> bool:
        """True if extra state marks the rows that stepped before."""
        return any(self.copied)


@contextlib.contextmanager
def _arithmetic_of_optax() -> Iterator[None]:
    """Sets JAX's defaults, on which Optax counts: it mixes int32 counts with floats, and scalars with arrays."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), jax.enable_x64(False):
        yield


@dataclasses.dataclass(frozen=True)
class Lifted(Optimizer):
    """An Optax transformation as an optimizer of rows, made by `lift`."""

    name: ClassVar[str] = "lift"
    # The transformation has its own; that of `collection.update` goes to inject_hyperparams.
    learning_rate: None = dataclasses.field(default=None, init=False, repr=False)  # pyright: ignore
    tx: "optax.GradientTransformation"
    rowwise: bool = False

    def __post_init__(self) -> None:
        import optax

        if not isinstance(self.tx, optax.GradientTransformation):
            remedy = "call its gradient_transformation()" if hasattr(self.tx, "gradient_transformation") else ""
            raise TypeError(
                f"optim.lift: tx: got {type(self.tx).__name__}, wanted an optax.GradientTransformation, as "
                f"optax.adamw(1e-3){'; ' * bool(remedy)}{remedy}."
            )
        checks.flag("optim.lift: rowwise", self.rowwise)
        try:
            hash(self.tx)
        except TypeError:
            raise TypeError(
                "optim.lift: tx: got a transformation that cannot be hashed, wanted functions for init and update."
            ) from None
        self._form(_A_DIM)
        try:
            program.compile_row_program(self, _A_DIM)
        except program.NotARowProgram as error:
            found = str(error).rpartition("step_row: ")[2].rstrip(".")
            remedy = "Use a fused optimizer of jaxsok.optim, or a transformation made of these"
            raise _refusal(f"its step of a row is no row program: {found}", remedy) from None

    def _form(self, dim: int) -> _Form:
        try:
            return _find_form(self.tx, dim, self.rowwise)
        except jax.errors.JAXTypeError as error:
            raise TypeError(
                "optim.lift: tx: got a transformation made of traced values; an optimizer is declared outside "
                "jit. Make it of numbers, with optax.inject_hyperparams, and pass the traced rate to "
                "collection.update(..., learning_rate=rate)."
            ) from error

    def state_specs(self, dim: int) -> tuple[RowState, ...]:
        return self._form(dim).state_specs

    def usable_states(self, dim: int, names: Sequence[str]) -> tuple[str, ...]:
        """Leaves the mark of a started row out, unless all state is there that begins as a function of the row."""
        form = self._form(dim)
        copied = {spec.name for spec, is_copied in zip(form.state_specs, form.copied, strict=False) if is_copied}
        mark = form.state_specs[-1].name if form.has_started else None
        return tuple(name for name in names if name != mark or copied <= set(names))

    def init_globals(self, dim: int) -> tuple[np.ndarray, ...]:
        return self._form(dim).global_state

    def global_names(self, dim: int) -> tuple[str | None, ...]:
        return self._form(dim).global_names

    def state_form(self, dim: int) -> str:
        nodes = " ".join(self._form(dim).nodes)
        return f"{type(self).__name__}({nodes}{', rowwise' if self.rowwise else ''})"

    def describe(self) -> str:
        with _arithmetic_of_optax(), jax.ensure_compile_time_eval():
            rows, globals_ = jnp.ones((2, _A_DIM), jnp.float32), self.init_globals(_A_DIM)
            closed = jax.make_jaxpr(self.tx.update)(rows, self.tx.init(rows), rows)
            # Arrays that functions close over are not in the text; an update depends on them.
            updates, _ = self.tx.update(rows, self.tx.init(rows), rows)
            numbers = [np.asarray(leaf).tolist() for leaf in (*globals_, np.asarray(updates)[0])]
            return f"{self!r}\n{numbers}\n{closed}"

    def hyper(self, step: Any, learning_rate: Any) -> tuple[Any, ...]:
        return ()  # steps take the global state, which `advance` returns

    def hyper_shapes(self, dim: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.init_globals(dim))

    def advance(
        self, globals_: tuple[Any, ...], step: Any, learning_rate: Any, dim: int
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        form = self._form(dim)
        declared = zip(globals_, form.global_state, form.global_names, strict=True)
        held = [jnp.asarray(own if name is None else leaf) for leaf, own, name in declared]
        before = list(held)
        if learning_rate is not None:
            if not form.rates:
                raise ValueError(
                    "update: learning_rate: got one, but a lifted optimizer has its own. Wrap it in "
                    "optax.inject_hyperparams, with a number for learning_rate, or pass a schedule to Optax."
                )
            for place in form.rates:
                if not jnp.issubdtype(before[place].dtype, jnp.floating):
                    raise ValueError(
                        f"update: learning_rate: got one, but optax.inject_hyperparams made {before[place].dtype} of "
                        "the lifted optimizer's number, wanted a float: write 1.0 in place of 1."
                    )
                before[place] = jnp.asarray(learning_rate).astype(before[place].dtype)
        with _arithmetic_of_optax():
            zeros = jnp.zeros((1, dim), jnp.float32)
            rows = self._initial_rows(form, zeros)
            _, after = self._update(form, zeros, zeros, rows, before)
        pairs = zip(held, _select_kind(form, after, is_row=False), strict=True)
        kept = [
            old if learning_rate is not None and place in form.rates else jnp.asarray(new).astype(old.dtype)
            for place, (old, new) in enumerate(pairs)
        ]
        return tuple(before), tuple(kept)

    def step_row(self, inputs: RowInputs) -> RowOutputs:
        gradient, row, states, _, global_state = inputs
        dim = row.shape[0]
        form = self._form(dim)
        with _arithmetic_of_optax():
            block = row.reshape(1, dim)
            row_leaves = [leaf for leaf in form.leaves if leaf.is_row]
            leaves = [
                _stored_to_leaf(state, leaf) for state, leaf in zip(states[: len(row_leaves)], row_leaves, strict=True)
            ]
            if form.has_started:
                started = states[-1]
                leaves = [
                    jnp.where(started.reshape((1,) * leaf.ndim) == 0, first, leaf) if copied else leaf
                    for leaf, first, copied in zip(leaves, self._initial_rows(form, block), form.copied, strict=True)
                ]
            moved, after = self._update(form, gradient.reshape(1, dim), block, leaves, global_state)
            new = [
                value.astype(jnp.float32).reshape(state.shape)
                for value, state in zip(_select_kind(form, after, is_row=True), states, strict=False)
            ]
            if form.has_started:
                new.append(jnp.ones_like(states[-1]))
            return RowOutputs(moved.reshape(dim), tuple(new))

    def _initial_rows(self, form: _Form, block: Array) -> list[Array]:
        leaves = tree_util.tree_leaves(self.tx.init(block))
        return [jnp.asarray(leaf) for leaf in _select_kind(form, leaves, is_row=True)]

    def _update(
        self, form: _Form, gradient: Array, block: Array, rows: Any, global_state: Any
    ) -> tuple[Float[Array, "1 dim"], list[Any]]:
        import optax

        rows, global_state = iter(rows), iter(global_state)
        state = form.treedef.unflatten([next(rows if leaf.is_row else global_state) for leaf in form.leaves])
        updates, state = optax.with_extra_args_support(self.tx).update(gradient, state, block)
        return optax.apply_updates(block, updates), tree_util.tree_leaves(state)


def _select_kind(form: _Form, leaves: list[Any], *, is_row: bool) -> list[Any]:
    return [value for value, leaf in zip(leaves, form.leaves, strict=True) if leaf.is_row == is_row]


def _stored_to_leaf(state: Array, leaf: _Leaf) -> Array:
    """Converts stored state, float32, which holds each number of a narrower dtype exactly."""
    value = state.reshape(leaf.shape)
    return value != 0 if leaf.dtype == jnp.bool_ else value.astype(leaf.dtype)


# The form of a transformation ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
@_arithmetic_of_optax()
def _find_form(tx: Any, dim: int, rowwise: bool) -> _Form:
    """Finds the form of a transformation's state; raises the errors of `lift`."""
    import optax

    tx = optax.with_extra_args_support(tx)
    states = {num_rows: _initial_shapes(tx, num_rows, dim) for num_rows in (1, *_NUM_ROWS)}
    for name in _classes(states[1]):
        if name in _DENIED:
            reason, remedy = _DENIED[name]
            raise _refusal(f"its state holds {name}: {reason}", remedy)
    leaves = _leaves(states, dim)
    num_rows = next(n for n in _NUM_ROWS if n != dim)
    block = jax.ShapeDtypeStruct((num_rows, dim), jnp.float32)
    init, update, shapes = _trace(tx, states[num_rows], block)
    (old, old_tree), (new, new_tree) = map(tree_util.tree_flatten, (states[num_rows], shapes[1]))
    if old_tree != new_tree or [leaf.shape for leaf in old] != [leaf.shape for leaf in new]:
        raise _refusal("its state changes its structure or shapes in an update", "Use another optimizer")
    changed = {f"{a.dtype} to {b.dtype}" for a, b in zip(old, new, strict=True) if a.dtype != b.dtype}
    if changed:
        raise _refusal(
            f"its state changes its dtype in an update, from {', '.join(sorted(changed))}",
            "Let its init return the dtype that its update does",
        )

    kinds = [0 if leaf.is_row else None for leaf in leaves]
    first = separable.dependences(init, [0], num_rows)
    after = separable.dependences(update, [0, *kinds, 0], num_rows)
    num_updates = len(after) - len(leaves)
    for leaf, *found in zip(leaves, first, after[num_updates:], strict=True):
        if not leaf.is_row and any(dependence is not None for dependence in found):
            raise _refusal(
                f"its state {leaf.place} is one for all rows, yet depends on their data",
                "Use an optimizer whose state is by row, or a fused one of jaxsok.optim",
            )
    _refuse_dependences([*after[:num_updates], *first, *after[num_updates:]], rowwise=rowwise)
    if not rowwise:
        _refuse_factored(tx, leaves)
        _refuse_sized(tx, states[1], (init, update), num_rows, dim)
    return _form_in_store(tx, states[1], leaves, first, dim)


def _initial_shapes(tx: Any, num_rows: int, dim: int) -> Any:
    table = jax.ShapeDtypeStruct((num_rows, dim), jnp.float32)
    try:
        return jax.eval_shape(tx.init, table)
    except Exception as error:
        raise _refusal(
            f"its init fails on a table, which is one array of [num_rows, dim]: {_first_line(error)}",
            "Masks and labels must fit a single array: pass True, a label, or a function of the parameters",
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160].rstrip('. ') if lines else ''}".rstrip(": ")


def _classes(state: Any) -> list[str]:
    classes: list[str] = []
    # is_leaf sees every node on the way down.
    tree_util.tree_leaves(state, is_leaf=lambda node: classes.append(type(node).__name__) or False)
    return classes


def _leaves(states: dict[int, Any], dim: int) -> tuple[_Leaf, ...]:
    """Returns the leaves of the state of one row; refuses one that is neither a row's nor the store's."""
    flat = {num_rows: tree_util.tree_flatten_with_path(state)[0] for num_rows, state in states.items()}
    if len({tree_util.tree_structure(state) for state in states.values()}) > 1:
        raise _refusal("the structure of its state depends on the number of rows", "Use a fused optimizer")
    leaves = []
    for i, (path, array) in enumerate(flat[1]):
        shapes = {num_rows: flat[num_rows][i][1].shape for num_rows in flat}
        rest = array.shape[1:]
        is_global = set(shapes.values()) == {array.shape}
        is_row = all(shape == (num_rows, *rest) for num_rows, shape in shapes.items())
        leaf = _Leaf(tuple(path), array.shape, array.dtype, is_row)
        if jnp.issubdtype(array.dtype, jax.dtypes.extended):
            raise _refusal(
                f"its state {leaf.place} is a random key, and random numbers do not fit rows", "Leave it out"
            )
        if not is_global and not (is_row and rest in ((), (1,), (dim,))):
            shape = list(shapes[_NUM_ROWS[0]])
            raise _refusal(
                f"its state {leaf.place} is {shape} for {_NUM_ROWS[0]} rows of {dim}: neither one line per row, of "
                "one number or of dim, nor the same for any number of rows",
                "Use an optimizer whose state is by row",
            )
        if is_row and array.dtype not in (jnp.float32, jnp.bfloat16, jnp.bool_):
            raise _refusal(
                f"its state {leaf.place} is {array.dtype} by row, and rows keep float32 or bfloat16",
                "Choose another dtype for it",
            )
        leaves.append(leaf)
    return tuple(leaves)


def _trace(tx: Any, state: Any, block: Any) -> tuple[Any, Any, Any]:
    """Traces init (to its leaves) and update (to updates, then leaves); also returns the shapes of the latter."""
    leaves, treedef = tree_util.tree_flatten(state)

    def init(rows: Any) -> Any:
        return [jnp.asarray(leaf) for leaf in tree_util.tree_leaves(tx.init(rows))]

    def update(gradient: Any, leaves: Any, rows: Any) -> Any:
        return tx.update(gradient, treedef.unflatten(leaves), rows)

    try:
        traced, shapes = jax.make_jaxpr(update, return_shape=True)(block, leaves, block)
    except Exception as error:
        raise _refusal(
            f"its update fails on gradient, state and parameters alone: {_first_line(error)}",
            "What needs the loss, or other arguments, cannot be lifted: leave it out",
        ) from error
    return jax.make_jaxpr(init)(block), traced, shapes


def _refuse_dependences(found: list[separable.Dependence], *, rowwise: bool) -> None:
    by_place = Coupled(separable.BY_PLACE)
    if any(isinstance(dependence, separable.Positional) or dependence == by_place for dependence in found):
        raise _refusal(
            "what it does to a row depends on the place of the row in the batch",
            "Noise and counters along the rows cannot be lifted: leave them out",
        )
    coupled = next((dependence for dependence in found if isinstance(dependence, Coupled)), None)
    if coupled is not None and not rowwise:
        raise _refusal(
            f"the step of a row may depend on other rows: it {coupled.reason}",
            "Pass rowwise=True for the same formula on each row alone, which is another optimizer; clip by a global "
            "norm outside (docs/optax.md)",
        )


def _refuse_factored(tx: Any, leaves: tuple[_Leaf, ...]) -> None:
    """Refuses state that is by row in a small table, but may be factored in a large one."""
    large = tree_util.tree_leaves(_initial_shapes(tx, _MANY_ROWS, _MANY_COLUMNS))
    small = tree_util.tree_leaves(_initial_shapes(tx, 1, _MANY_COLUMNS))
    for leaf, few, many in zip(leaves, small, large, strict=False):
        if many.shape != ((_MANY_ROWS, *few.shape[1:]) if leaf.is_row else few.shape):
            raise _refusal(
                f"its state {leaf.place} is {list(many.shape)} in a table of {_MANY_ROWS} rows of {_MANY_COLUMNS}: "
                "it is factored, and couples rows",
                "Pass factored=False to it, or rowwise=True to step each row alone, unfactored",
            )


def _refuse_sized(tx: Any, of_one_row: Any, of_few: tuple[Any, Any], few: int, dim: int) -> None:
    """Refuses a formula that depends on the number of rows: its step of one row is not that of a table."""

    def trace(num_rows: int, state: Any) -> tuple[Any, ...]:
        return _trace(tx, state, jax.ShapeDtypeStruct((num_rows, dim), jnp.float32))[:2]

    def formulas(functions: Sequence[Any], num_rows: int | None) -> list[Any]:
        return [separable.formula_of(function, num_rows) for function in functions]

    of_many = trace(_MANY_ROWS, _initial_shapes(tx, _MANY_ROWS, dim))
    depends = formulas(of_few, few) != formulas(of_many, _MANY_ROWS)
    # In a block of one row any axis of length 1 may be that of the rows: sizes do not count.
    if depends or formulas(of_few, None) != formulas(trace(1, of_one_row), None):
        raise _refusal(
            "its formula depends on the number of rows in the table",
            "Pass rowwise=True to step each row as a table of one row",
        )


def _form_in_store(
    tx: Any, state: Any, leaves: tuple[_Leaf, ...], found: list[separable.Dependence], dim: int
) -> _Form:
    """Finds initial values: numbers, where `init` reads no row and gives all columns the same one."""
    with jax.ensure_compile_time_eval():
        values = [np.asarray(leaf) for leaf in tree_util.tree_leaves(tx.init(jnp.zeros((1, dim), jnp.float32)))]
    specs, copied, global_state, names = [], [], [], []
    places = _places_of_injected(state)
    scheduled = {_injected(places, leaf.path, "hyperparams_states") for leaf in leaves}
    rates = []
    for leaf, first, dependence in zip(leaves, values, found, strict=True):
        if leaf.is_row:
            numbers = first.astype(np.float32).reshape(-1)
            is_copied = dependence is not None or not np.all(numbers == numbers[0])
            value = 0.0 if is_copied else float(numbers[0])
            specs.append(RowState(_name(leaf, specs), int(np.prod(leaf.shape[1:])), value))
            copied.append(is_copied)
            continue
        injected = _injected(places, leaf.path, "hyperparams")
        if injected is None or injected in scheduled:
            names.append(leaf.place)
        else:
            names.append(None)
            rates += [len(global_state)] if injected[1] == "learning_rate" else []
        global_state.append(first)
    if any(copied):
        specs.append(RowState(_unique(_STARTED, specs), 1, 0.0))
    if len(specs) > MAX_STATES:
        raise _refusal(
            f"it has {len(specs)} arrays of state by row, and rows keep at most {MAX_STATES}",
            "Use a transformation with less state",
        )
    # Not str of the tree's structure, since the repr of a node may contain addresses.
    inner = [name for name in _classes(state) if name != jax.ShapeDtypeStruct.__name__]
    nodes = (*inner, *(f"{leaf.place}:{leaf.dtype}" for leaf in leaves))
    treedef = tree_util.tree_structure(state)
    of_store = tuple(global_state), tuple(names), nodes, tuple(rates)
    return _Form(treedef, leaves, tuple(specs), tuple(copied), *of_store)


def _places_of_injected(state: Any, place: tuple[Any, ...] = ()) -> set[tuple[Any, ...]]:
    """Returns the paths of the states of `optax.inject_hyperparams`, also of those within others."""
    import optax

    is_one = lambda node: isinstance(node, optax.InjectStatefulHyperparamsState)  # noqa: E731
    places: set[tuple[Any, ...]] = set()
    for path, node in tree_util.tree_flatten_with_path(state, is_leaf=is_one)[0]:
        if is_one(node):
            inner = (*place, *path, tree_util.GetAttrKey("inner_state"))
            places |= {(*place, *path)} | _places_of_injected(node.inner_state, inner)
    return places


def _injected(places: set[tuple[Any, ...]], path: tuple[Any, ...], field: str) -> tuple[str, str] | None:
    """Returns the path of the state, of `places`, that holds `<field>[name]` on the way to a leaf, and the name."""
    for i, (outer, inner) in enumerate(itertools.pairwise(path)):
        is_field = getattr(outer, "name", None) == field and path[:i] in places
        if is_field and isinstance(name := getattr(inner, "key", None), str):
            return tree_util.keystr(path[:i]), name
    return None


def _name(leaf: _Leaf, taken: list[RowState]) -> str:
    words = [getattr(part, "name", getattr(part, "key", None)) for part in leaf.path]
    return _unique(next((word for word in reversed(words) if isinstance(word, str)), "state"), taken)


def _unique(name: str, taken: list[RowState]) -> str:
    names = [state.name for state in taken]
    candidates = (name, *(f"{name}_{i}" for i in range(2, len(names) + 3)))
    return next(candidate for candidate in candidates if candidate not in names)


def lift(tx: "optax.GradientTransformation", *, rowwise: bool = False) -> Lifted:
    """Makes an Optax transformation a sparse optimizer: its own formulas, on the rows that a step used.

    Optax counts, schedules and injected hyper-parameters are the store's, one for all rows; momenta and accumulators
    are the rows'. A row that no key uses does not move and its state does not decay. Two tables share a store if their
    optimizers lift the same object.

    `tx` may have chains, schedules, `optax.inject_hyperparams`, masks that fit a single array, and mu_dtype. What
    couples rows is refused, or with `rowwise` applied to each row as if that row were all the parameters: lamb with a
    trust ratio by row, clipping by the norm of a row. That is another optimizer.

    Raises:
      ValueError: it couples rows, or cannot be lifted at all; the message says why and what to do.
      TypeError: `tx` is no `optax.GradientTransformation`.

    Cost:
      State: one number per column for each moment. Declaring it takes some 0.1 s.

    Example:
      >>> import optax
      >>> lift(optax.adam(1e-3)).state_specs(dim=64)
      (RowState(name='mu', dim=64, initial_value=0.0), RowState(name='nu', dim=64, initial_value=0.0))

    Source: docs/optax.md.
    """
    return Lifted(tx, rowwise)
