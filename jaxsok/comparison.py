"""Comparison of a collection with another system that takes the same steps."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxsok.collection import Collection
from jaxsok.store import State

PeerRows = Callable[[str, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Parity:
    """The result of `parity`; `print` it."""

    num_steps: int
    """Steps taken. Before the last of them all rows agreed; after it too, if `table` is None."""
    losses: np.ndarray
    """float64[num_steps, 2]: what the steps returned here and there; NaN where they returned none."""
    state: State
    table: str | None = None
    """The first table that differs, and below its row with the smallest key; None: all agree."""
    key: int | None = None
    ours: np.ndarray | None = None
    theirs: np.ndarray | None = None

    def __str__(self) -> str:
        if self.ours is None or self.theirs is None:
            return f"{self.num_steps} steps agree"
        column = int(np.argmax(np.nan_to_num(abs(self.ours - self.theirs), nan=np.inf)))
        return (
            f'after step {self.num_steps}: table "{self.table}", key {self.key}: row[{column}] is '
            f"{self.ours[column]} here and {self.theirs[column]} there"
        )


def parity(
    collection: Collection,
    state: State,
    step: Callable[[State, Any], Any],
    peer_step: Callable[[Any], Any],
    peer_rows: PeerRows,
    batches: Iterable[Any],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> Parity:
    """Takes the same steps here and in another system, and finds the first step, table and row that differ.

    All rows here are compared before the first step and after each one, until a table differs; of its rows the one with
    the smallest key is reported. Numbers agree if `abs(ours - theirs) <= atol + rtol * abs(theirs)`, or both are NaN.

    Args:
      collection: its tables are compared, all their rows.
      state: where both begin; donated if `step` donates it.
      step: `(state, batch) -> state` or `(state, loss)`.
      peer_step: `(batch) -> loss` or None: takes a step in the other system.
      peer_rows: `(table, keys) -> [num_keys, dim]`, of uint64 keys; `jaxsok.interchange.torchrec.rows_of` makes it of a
        model of TorchRec.
      batches: given to both, one after the other.
      rtol: how far numbers may lie apart, by the peer's.
      atol: the same for small numbers.

    Raises:
      ValueError: rows of another shape.

    Cost:
      All rows go to the host after each step, 64 MiB at a time.

    Example:
      >>> import jaxsok, jax.numpy as jnp
      >>> spec = jaxsok.TableSpec("item", 2, jaxsok.optim.sgd(0.5), initializer=jaxsok.initializers.zeros(), capacity=8)
      >>> collection = jaxsok.Collection([spec], [jaxsok.FeatureSpec("item", table="item")])
      >>> def step(state, keys):
      ...     _, state, plan = collection.lookup(state, collection.batch({"item": keys}).features)
      ...     return collection.update(state, plan, {"item": jnp.ones((len(keys), 2))})[0]
      >>> rows = np.zeros((10, 2), np.float32)  # the other system: it takes shorter steps for key 9
      >>> def peer_step(keys):
      ...     rows[keys] -= np.where(keys == 9, 0.25, 0.5)[:, None]
      >>> peer_rows = lambda table, keys: rows[keys]
      >>> print(parity(collection, collection.init(), step, peer_step, peer_rows, [np.array([7, 8]), np.array([8, 9])]))
      after step 2: table "item", key 9: row[0] is -0.5 here and -0.25 there
    """
    losses, batches, differs = [], iter(batches), _first_difference(collection, state, peer_rows, rtol, atol)
    while not differs and (batch := next(batches, None)) is not None:
        result, theirs = step(state, batch), peer_step(batch)
        state, ours = (result, None) if isinstance(result, State) else result
        losses.append([np.nan if loss is None else float(loss) for loss in (ours, theirs)])
        differs = _first_difference(collection, state, peer_rows, rtol, atol)
    return Parity(len(losses), np.array(losses, np.float64).reshape(-1, 2), state, **differs)


def _first_difference(
    collection: Collection, state: State, peer_rows: PeerRows, rtol: float, atol: float
) -> dict[str, Any]:
    """Returns the fields of a `Parity` that name the first row that differs; empty if none does."""
    for table in [table.name for table in collection.tables]:
        found = []
        for records in collection.export_chunks(state, table, with_state=False):
            ours, theirs = records.rows.astype(np.float32), np.asarray(peer_rows(table, records.keys), np.float32)
            if ours.shape != theirs.shape:
                raise ValueError(f'parity: peer_rows: "{table}": got shape {theirs.shape}, wanted {ours.shape}.')
            wrong = np.flatnonzero(~np.isclose(ours, theirs, rtol, atol, equal_nan=True).all(axis=1))
            if wrong.size:
                line = wrong[np.argmin(records.keys[wrong])]
                found.append({"key": int(records.keys[line]), "ours": ours[line], "theirs": theirs[line]})
        if found:
            return {"table": table, **min(found, key=lambda difference: difference["key"])}
    return {}
