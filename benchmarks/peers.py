"""The peers: static tables in plain XLA, and FBGEMM's table-batched embeddings where they can be imported.

Static tables know no keys: an id is its row. XLA's are one stacked table [num_tables * num_rows, dim], one `jnp.take`
and one update for all features, which is faster than a table each. The forward is `jnp.take` as users write it. The
update is the same optimizer on the touched rows alone (a dense gradient would be as large as the tables): SGD is
`.at[rows].add` with repeated rows; an optimizer with state must see each row once, so it sorts the ids, sums the
gradients of equal ones, and adds with `unique_indices=True`. Tables are donated.

FBGEMM, dynamicemb and NVE run in processes of their own (`fbgemm.py`, `dynamicemb.py`, `nve.py`), before JAX takes the
memory of the device.

Fed by the key sets; feeds `records.py`. Not here: limits, which do less than a peer does.
"""

import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from . import nve
from .limits import varied_floats
from .timing import Protocol, Step, Timing
from .workloads import KeySet, Workload, state_dims

LEARNING_RATE = 0.01
"""The learning rate of all systems and optimizers; small, so that thousands of steps with one gradient stay finite."""

ADAGRAD = {"initial_accumulator_value": 0.1, "eps": 1e-7}
ROWWISE_ADAGRAD = {"initial_accumulator_value": 0.0, "eps": 1e-8}
DYNAMICEMB = "JAXSOK_DYNAMICEMB"
"""The variable with the folders in which dynamicemb and what it imports lie, where they are not installed."""

ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}


class StaticTables:
    """The static tables of a workload in XLA, with the state of one optimizer."""

    def __init__(self, workload: Workload, optimizer: str):
        """Makes the tables; their contents look like data."""
        num_rows = workload.num_tables * workload.num_rows
        self.workload = workload
        self.optimizer = optimizer
        self.table = varied_floats((num_rows, workload.dim))
        self.states = tuple(
            jnp.full((num_rows, width), 0.1, jnp.float32) for width in state_dims(optimizer, workload.dim)
        )
        self._forward = Step(forward, donates=False)
        # In one program XLA may copy the whole table, since it does not see that all reads precede the writes.
        read = jax.jit(forward)
        write = jax.jit(functools.partial(update, optimizer), donate_argnums=0)

        def step(carry, inputs):
            embeddings = read(carry[0], inputs[0])
            return write(carry, inputs), embeddings

        self._step = Step(step, donates=True, is_compiled=True)

    def rows(self, key_set: KeySet) -> jax.Array:
        """Returns the rows of a key set: int32 [num_bags over all tables, hotness]."""
        return jnp.asarray(key_set.stacked_rows.reshape(-1, self.workload.hotness))

    def measure_forward(self, key_sets: Sequence[KeySet], protocol: Protocol) -> Timing:
        """Times the forward."""
        sets = [self.rows(key_set) for key_set in key_sets]
        timing, _ = self._forward.measure(self.table, sets, protocol, idle=sets[0][:1])
        return timing

    def measure_step(self, key_sets: Sequence[KeySet], protocol: Protocol) -> Timing:
        """Times forward and update together, with a given gradient of the embeddings."""
        sets = [self.rows(key_set) for key_set in key_sets]
        gradients = varied_floats((sets[0].shape[0], self.workload.dim))
        carry = (self.table, self.states, jnp.zeros((), jnp.int32))
        timing, carry = self._step.measure(
            carry, [(rows, gradients) for rows in sets], protocol, idle=(sets[0][:1], gradients[:1])
        )
        self.table, self.states, _ = carry
        return timing


def forward(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the embeddings [num_bags, dim] of rows [num_bags, hotness]; each bag's rows are added up."""
    taken = jnp.take(table, rows, axis=0)
    return taken.sum(axis=1)


def update(optimizer: str, carry, inputs):
    """Applies one optimizer step to the touched rows."""
    table, states, count = carry
    rows, gradients = inputs
    if optimizer == "sgd":
        repeated = jnp.broadcast_to(gradients[:, None, :], (*rows.shape, gradients.shape[1]))
        table = table.at[rows].add(-LEARNING_RATE * repeated)
        return table, states, count + 1
    unique, summed = sum_of_equal_rows(rows, gradients, table.shape[0])
    if optimizer == "rowwise_adagrad":
        (accumulator,) = states
        stepped = _get(accumulator, unique) + jnp.mean(jnp.square(summed), axis=1, keepdims=True)
        delta = -LEARNING_RATE * summed / (jnp.sqrt(stepped) + ROWWISE_ADAGRAD["eps"])
        states = (_set(accumulator, unique, stepped),)
    elif optimizer == "adagrad":
        (accumulator,) = states
        stepped = _get(accumulator, unique) + jnp.square(summed)
        delta = -LEARNING_RATE * summed * jax.lax.rsqrt(stepped + ADAGRAD["eps"])
        states = (_set(accumulator, unique, stepped),)
    elif optimizer == "adam":
        mean, variance = states
        b1, b2 = ADAM["b1"], ADAM["b2"]
        time = (count + 1).astype(jnp.float32)
        stepped_mean = b1 * _get(mean, unique) + (1 - b1) * summed
        stepped_variance = b2 * _get(variance, unique) + (1 - b2) * jnp.square(summed)
        mean_hat = stepped_mean / (1 - b1**time)
        delta = -LEARNING_RATE * mean_hat / (jnp.sqrt(stepped_variance / (1 - b2**time)) + ADAM["eps"])
        states = (_set(mean, unique, stepped_mean), _set(variance, unique, stepped_variance))
    else:
        raise ValueError(f"peers: no XLA step is written for the optimizer {optimizer!r}.")
    table = table.at[unique].add(delta, mode="drop", unique_indices=True, indices_are_sorted=True)
    return table, states, count + 1


def sum_of_equal_rows(rows: jax.Array, gradients: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the distinct rows of a batch and the sum of the gradients of each.

    Args:
      rows: int32 [num_bags, hotness].
      gradients: float32 [num_bags, dim]; each key of a bag gets the bag's.
      num_rows: rows of the table; padding lies beyond it, so that a scatter drops it.

    Returns:
      int32 [num_bags * hotness], ascending, and float32 [num_bags * hotness, dim].
    """
    hotness = rows.shape[1]
    flat = rows.reshape(-1)
    position = jax.lax.iota(jnp.int32, flat.size)
    ordered, origin = jax.lax.sort((flat, position), num_keys=1)
    is_first = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    segment = jnp.cumsum(is_first, dtype=jnp.int32) - 1
    summed = jax.ops.segment_sum(gradients[origin // hotness], segment, flat.size, indices_are_sorted=True)
    unique = (num_rows + position).at[segment].set(ordered, indices_are_sorted=True)
    return unique, summed


def _get(array: jax.Array, rows: jax.Array) -> jax.Array:
    return array.at[rows].get(mode="fill", fill_value=0.0, unique_indices=True, indices_are_sorted=True)


def _set(array: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[rows].set(values, mode="drop", unique_indices=True, indices_are_sorted=True)


def why_no_fbgemm() -> str | None:
    """Returns why FBGEMM cannot be measured here, or None if it can."""
    missing = [name for name in ("torch", "fbgemm_gpu") if importlib.util.find_spec(name) is None]
    return f"not importable here: {', '.join(missing)}" if missing else None


def run_fbgemm(arguments: Sequence[str], timeout_s: float) -> dict:
    """Measures FBGEMM in a process of its own and returns what `fbgemm.py` wrote: records, failures, versions."""
    return _run_alone("FBGEMM", arguments, timeout_s)


def run_fbgemm_cache(arguments: Sequence[str], timeout_s: float) -> dict:
    """Measures FBGEMM's cache in a process of its own and returns what `fbgemm_cache.py` wrote."""
    return _run_alone("FBGEMM_cache", arguments, timeout_s)


def why_no_nve() -> str | None:
    """Returns why NVE cannot be measured here, or None if it was found or is asked for by its variable."""
    return None if nve.find() else f"not importable here: pynve, and {nve.FOLDER} is not set"


def run_nve(arguments: Sequence[str], timeout_s: float) -> dict:
    """Measures NVE's cache in a process of its own and returns what `nve.py` wrote."""
    return _run_alone("NVE", arguments, timeout_s, os.environ | {nve.FOLDER: str(nve.find())})


def why_no_dynamicemb() -> str | None:
    """Returns why dynamicemb cannot be measured here, or None if it can."""
    wanted = ("torch",) if os.environ.get(DYNAMICEMB) else ("torch", "dynamicemb")
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    return f"not importable here: {', '.join(missing)}" if missing else None


def run_dynamicemb(arguments: Sequence[str], timeout_s: float) -> dict:
    """Measures dynamicemb in a process of its own and returns what `dynamicemb.py` wrote."""
    folders = [os.environ.get(name) for name in (DYNAMICEMB, "PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}
    return _run_alone("dynamicemb", arguments, timeout_s, environment)


def _run_alone(
    peer: str, arguments: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "peer.json"
        command = [sys.executable, "-m", f"{__package__}.{peer.lower()}", "--out", str(out), *arguments]
        root = pathlib.Path(__file__).resolve().parents[len(__package__.split("."))]
        failure = None
        try:
            completed = subprocess.run(command, cwd=root, timeout=timeout_s, check=False, env=environment)
            if completed.returncode:
                failure = f"exit status {completed.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {timeout_s:.0f} s"
        found = json.loads(out.read_text()) if out.exists() else {"records": [], "failures": [], "about": {}}
    if failure:
        found["failures"].append({"what": peer, "why": failure})
    return found
