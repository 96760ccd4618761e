"""An expected error whose message names the op, the argument and the actual value, and collections for bad calls."""

import jax
import pytest

import jaxsok

DIM = 4
SGD = jaxsok.optim.sgd(1.0)
BAD_KIND = (TypeError, ValueError)  # a number of another kind may also count as a wrong value


def raises(kind, *parts):
    """Expects an error of one kind whose message has all the parts (op, argument, actual value), whatever the case."""
    return _Raises(kind, parts)


class _Raises:
    def __init__(self, kind, parts):
        self.expected, self.parts = pytest.raises(kind), parts

    def __enter__(self):
        self.info = self.expected.__enter__()
        return self.info

    def __exit__(self, *error):
        if not self.expected.__exit__(*error):
            return False  # another kind of error: pytest shows it
        message = str(self.info.value)
        for part in self.parts:
            assert str(part).lower() in message.lower(), f"{part!r} is not in: {message}"
        return True


def over_two(axes=("data",), axis="data", tables=None, exchange=None, **feature):
    """Returns a collection over a mesh whose first axis has two devices and whose other axes have one."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    shape = (2, *[1] * (len(axes) - 1))
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    mesh = jax.make_mesh(shape, axes, axis_types=types, devices=jax.devices()[:2])
    tables = [jaxsok.TableSpec("user", DIM, SGD, capacity=16)] if tables is None else tables
    return jaxsok.Collection(
        tables, [jaxsok.FeatureSpec("user", "user", **feature)], mesh=mesh, axis=axis, exchange=exchange
    )


def over_one_table():
    """Returns a collection of two features of one table."""
    return jaxsok.Collection(
        [jaxsok.TableSpec("user", DIM, SGD, capacity=16)],
        [jaxsok.FeatureSpec("user", "user"), jaxsok.FeatureSpec("friend", "user")],
    )
