"""Names in profiles: the call and the store of the host's work and of a program's operations.

Public calls are named "jaxsok.<call>": on the host's lines of a trace (`jax.profiler.trace`), and in the metadata of
the operations that they make, which profilers show with each kernel.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxsok.specs import StoreSpec

MAX_TABLES = 3  # named for a store, which may have hundreds


@contextlib.contextmanager
def annotate(name: str) -> Iterator[None]:
    """Names the work that runs inside, in about two microseconds on the host; also a decorator."""
    with jax.profiler.TraceAnnotation(name), jax.named_scope(name):
        yield


def annotate_store(function: Callable) -> Callable:
    """Names a function's operations by the first tables of its (or its object's) StoreSpec: "store[C1,C2,C3,+23]"."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        spec = next(found for arg in args if isinstance(found := getattr(arg, "spec", arg), StoreSpec))
        names = [table.name for table in spec.tables[:MAX_TABLES]]
        more = len(spec.tables) - len(names)
        with jax.named_scope(f"store[{','.join(names + [f'+{more}'] * bool(more))}]"):
            return function(*args, **kwargs)

    return run
