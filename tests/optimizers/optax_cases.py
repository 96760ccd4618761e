"""Every transformation of Optax, as a user would call it, and the verdict of `optim.lift`.

`PYTHONPATH=. python tests/optimizers/optax_cases.py` rewrites the table of docs/optax.md.
"""

import dataclasses
import functools
import inspect
import pathlib
import re
import warnings

import jax.numpy as jnp
import optax
import optax.contrib

import jaxsok

PAGE = pathlib.Path(__file__).parents[2] / "docs/optax.md"
RATE = 0.05


def _sgd():
    return optax.sgd(RATE)


# Calls of functions that need more than a learning rate, or that are worth calling twice.
CALLS = {
    "optax.adafactor": {
        "adafactor(lr)": lambda: optax.adafactor(RATE),
        "adafactor(lr, multiply_by_parameter_scale=False, clipping_threshold=None)": lambda: optax.adafactor(
            RATE, multiply_by_parameter_scale=False, clipping_threshold=None
        ),
        "adafactor(lr, factored=False, multiply_by_parameter_scale=False, clipping_threshold=None)": (
            lambda: optax.adafactor(RATE, factored=False, multiply_by_parameter_scale=False, clipping_threshold=None)
        ),
    },
    "optax.adadelta": {"adadelta(lr)": lambda: optax.adadelta(RATE)},
    "optax.adam": {
        "adam(lr)": lambda: optax.adam(RATE),
        "adam(lr, nesterov=True)": lambda: optax.adam(RATE, nesterov=True),
        "adam(lr, mu_dtype=bfloat16)": lambda: optax.adam(RATE, mu_dtype=jnp.bfloat16),
        "adam(schedule)": lambda: optax.adam(optax.exponential_decay(RATE, 3, 0.5)),
    },
    "optax.adaptive_grad_clip": {"adaptive_grad_clip(0.1)": lambda: optax.adaptive_grad_clip(0.1)},
    "optax.add_decayed_weights": {"add_decayed_weights(0.1)": lambda: optax.add_decayed_weights(0.1)},
    "optax.add_noise": {"add_noise(0.1, 0.1, key)": lambda: optax.add_noise(0.1, 0.1, 0)},
    "optax.apply_every": {"apply_every(2)": lambda: optax.apply_every(2)},
    "optax.apply_if_finite": {"apply_if_finite(sgd, 3)": lambda: optax.apply_if_finite(_sgd(), 3)},
    "optax.chain": {"chain(clip, adam)": lambda: optax.chain(optax.clip(0.5), optax.adam(RATE))},
    "optax.clip": {"clip(0.5)": lambda: optax.clip(0.5)},
    "optax.clip_by_block_rms": {"clip_by_block_rms(0.5)": lambda: optax.clip_by_block_rms(0.5)},
    "optax.clip_by_global_norm": {
        "clip_by_global_norm(0.5)": lambda: optax.clip_by_global_norm(0.5),
        "clip_by_global_norm(1e9)": lambda: optax.clip_by_global_norm(1e9),
    },
    "optax.conditionally_mask": {
        "conditionally_mask(sgd, every second step)": lambda: optax.conditionally_mask(
            _sgd(), lambda step: step % 2 == 0
        )
    },
    "optax.conditionally_transform": {
        "conditionally_transform(sgd, every second step)": lambda: optax.conditionally_transform(
            _sgd(), lambda step: step % 2 == 0
        )
    },
    "optax.ema": {"ema(0.9)": lambda: optax.ema(0.9)},
    "optax.flatten": {"flatten(adam)": lambda: optax.flatten(optax.adam(RATE))},
    "optax.freeze": {"freeze(True)": lambda: optax.freeze(True)},
    "optax.inject_hyperparams": {
        "inject_hyperparams(adam)(lr)": lambda: optax.inject_hyperparams(optax.adam)(RATE),
        "inject_hyperparams(adam)(schedule)": lambda: optax.inject_hyperparams(optax.adam)(
            optax.exponential_decay(RATE, 3, 0.5)
        ),
    },
    "optax.inject_stateful_hyperparams": {},  # the older name of inject_hyperparams, deprecated
    "optax.lookahead": {"lookahead(sgd, 5, 0.5)": lambda: optax.lookahead(_sgd(), 5, 0.5)},
    "optax.masked": {"masked(sgd, True)": lambda: optax.masked(_sgd(), True)},
    "optax.measure_with_ema": {},  # makes a measure for snapshots, not a transformation
    "optax.monitor": {"monitor({name: measure})": lambda: optax.monitor({"largest": lambda tree: jnp.max(tree)})},
    "optax.multi_transform": {},  # the older name of partition
    "optax.named_chain": {
        "named_chain((name, clip), (name, adam))": lambda: optax.named_chain(
            ("clip", optax.clip(0.5)), ("adam", optax.adam(RATE))
        )
    },
    "optax.partition": {
        "partition({label: adam}, label)": lambda: optax.partition({"rows": optax.adam(RATE)}, lambda _: "rows")
    },
    "optax.rmsprop": {
        "rmsprop(lr)": lambda: optax.rmsprop(RATE),
        "rmsprop(lr, centered=True, momentum=0.9)": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    },
    "optax.scale": {"scale(-lr)": lambda: optax.scale(-RATE)},
    "optax.scale_by_backtracking_linesearch": {
        "scale_by_backtracking_linesearch(5)": lambda: optax.scale_by_backtracking_linesearch(5)
    },
    "optax.scale_by_factored_rms": {
        "scale_by_factored_rms()": lambda: optax.scale_by_factored_rms(),
        "scale_by_factored_rms(factored=False)": lambda: optax.scale_by_factored_rms(factored=False),
    },
    "optax.scale_by_rprop": {"scale_by_rprop(lr)": lambda: optax.scale_by_rprop(RATE)},
    "optax.scale_by_schedule": {
        "scale_by_schedule(schedule)": lambda: optax.scale_by_schedule(optax.exponential_decay(-RATE, 3, 0.5))
    },
    "optax.scale_by_learning_rate": {"scale_by_learning_rate(lr)": lambda: optax.scale_by_learning_rate(RATE)},
    "optax.scale_by_zoom_linesearch": {"scale_by_zoom_linesearch(5)": lambda: optax.scale_by_zoom_linesearch(5)},
    "optax.selective_transform": {
        "selective_transform(sgd, False)": lambda: optax.selective_transform(_sgd(), freeze_mask=False)
    },
    "optax.sgd": {
        "sgd(lr)": lambda: optax.sgd(RATE),
        "sgd(lr, momentum=0.9)": lambda: optax.sgd(RATE, momentum=0.9),
        "sgd(lr, momentum=0.9, nesterov=True)": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    },
    "optax.snapshot": {"snapshot(name, measure)": lambda: optax.snapshot("largest", lambda tree: jnp.max(tree))},
    "optax.stateless": {
        "stateless(function by column)": lambda: optax.stateless(lambda updates, params: -RATE * jnp.tanh(updates))
    },
    "optax.stateless_with_tree_map": {
        "stateless_with_tree_map(function by column)": lambda: optax.stateless_with_tree_map(
            lambda g, p: -RATE * jnp.tanh(g)
        )
    },
    "optax.trace": {"trace(0.9)": lambda: optax.trace(0.9)},
    "optax.with_extra_args_support": {},  # changes nothing
    "optax.MultiSteps": {
        "MultiSteps(sgd, 2)": lambda: optax.MultiSteps(_sgd(), 2).gradient_transformation(),
    },
    "optax.contrib.differentially_private_aggregate": {
        "differentially_private_aggregate(1.0, 0.1, seed)": lambda: optax.contrib.differentially_private_aggregate(
            1.0, 0.1, **_seed(optax.contrib.differentially_private_aggregate)
        )
    },
    "optax.contrib.dpsgd": {"dpsgd(lr, 1.0, 0.1, seed)": lambda: optax.contrib.dpsgd(RATE, 1.0, 0.1, 0)},
    "optax.contrib.hutchinson_estimator_diag_hessian": {
        "hutchinson_estimator_diag_hessian()": lambda: optax.contrib.hutchinson_estimator_diag_hessian()
    },
    "optax.contrib.mechanize": {"mechanize(sgd)": lambda: optax.contrib.mechanize(_sgd())},
    "optax.contrib.sam": {"sam(sgd, sgd)": lambda: optax.contrib.sam(_sgd(), _sgd())},
    "optax.contrib.schedule_free": {
        "schedule_free(sgd, lr)": lambda: optax.contrib.schedule_free(_sgd(), RATE),
    },
    "optax.contrib.split_real_and_imaginary": {
        "split_real_and_imaginary(adam)": lambda: optax.contrib.split_real_and_imaginary(optax.adam(RATE))
    },
    "optax.contrib.dog": {"dog(lr)": lambda: optax.contrib.dog(1.0)},
    "optax.contrib.dowg": {"dowg(lr)": lambda: optax.contrib.dowg(1.0)},
    "optax.contrib.reduce_on_plateau": {"reduce_on_plateau()": lambda: optax.contrib.reduce_on_plateau()},
}


def _seed(function):
    """Returns the keyword of a random seed: older versions have `seed` in place of `key`."""
    return {"key" if "key" in inspect.signature(function).parameters else "seed": 0}


def makers():
    """Returns every public function of Optax that makes a transformation, by name, from its annotation or CALLS."""
    found = {"optax.MultiSteps": optax.MultiSteps}
    for module, prefix in ((optax, "optax."), (optax.contrib, "optax.contrib.")):
        for name in sorted(dir(module)):
            function = getattr(module, name)
            if name.startswith("_") or inspect.isclass(function) or not callable(function):
                continue
            try:
                returned = str(inspect.signature(function).return_annotation)
            except ValueError:  # a type, not a function
                continue
            if "GradientTransformation" in returned or prefix + name in CALLS:
                found[prefix + name] = function
    return found


@functools.cache
def cases():
    """Returns calls, as {"optax.contrib.": call} and functions that make it, by name of the function in Optax."""
    result = {}
    for name, function in makers().items():
        if name in CALLS:
            result[name] = CALLS[name]
            continue
        short, parameters = name.rpartition(".")[2], inspect.signature(function).parameters
        needed = [key for key, value in parameters.items() if value.default is value.empty and value.kind < 2]
        assert needed in ([], ["learning_rate"]), f"{name}: say in CALLS how to call it with {needed}"
        if "learning_rate" in parameters:
            result[name] = {f"{short}(lr)": lambda function=function: function(RATE)}
        else:
            result[name] = {f"{short}()": function}
    return result


def make_quietly(make):
    """Returns a transformation, without Optax's warnings about the call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict of `lift` on a transformation."""

    kind: str
    detail: str
    """The state of a row, and why it is not exact."""


@functools.cache
def verdict(make):
    """Returns the result of `lift` for a transformation, or the reason of its refusal."""
    tx = make_quietly(make)
    try:
        return Verdict("exact", _state_of(jaxsok.optim.lift(tx)))
    except ValueError as refused:
        why = _reason(refused)
    try:
        return Verdict("row-wise variant", f"{_state_of(jaxsok.optim.lift(tx, rowwise=True))}; {why}")
    except ValueError as refused:
        return Verdict("refused", _reason(refused))


def _reason(refused):
    return re.fullmatch(r"optim\.lift: refused: (.*?)\. [A-Z].*", str(refused), re.DOTALL)[1]


def _state_of(optimizer):
    dim = 64
    names = [f"`{state.name}`" + (" (1)" if state.dim == 1 else "") for state in optimizer.state_specs(dim)]
    return ", ".join(names) or "no state"


# The table -----------------------------------------------------------------------------------------------------------

HEADING = "## Every transformation of Optax"


def lines():
    """Returns the rows of the table: the call, the result of lift, and the state of a row or the reason."""
    result = []
    for name, calls in cases().items():
        prefix = name.removeprefix("optax.").rpartition(".")[0]
        for call, make in calls.items():
            found = verdict(make)
            shown = f"{prefix}.{call}" if prefix else call
            result.append(f"| `{shown}` | {found.kind} | {found.detail} |".replace("||", "| |"))
    return result


def section():
    """Returns the last section of the page, generated."""
    counts = [verdict(make).kind for calls in cases().values() for make in calls.values()]
    summary = ", ".join(f"{counts.count(kind)} {kind}" for kind in ("exact", "row-wise variant", "refused"))
    head = (
        f"Made by `tests/optimizers/optax_cases.py` with Optax {optax.__version__}, from all that Optax offers: "
        f"{summary}. Third column: the state of a row, (1) for one number in place of dim; why it is no exact lift.\n\n"
        "| `optax.` | lifted | state of a row, or why not |\n|---|---|---|\n"
    )
    return f"{HEADING}\n\n{head}" + "\n".join(lines()) + "\n"


def read_section():
    """Returns the present section of the page, and the Optax version that made it."""
    text = PAGE.read_text()
    text = text[text.index(HEADING) :]
    return text, re.search(r"with Optax ([\w.]+),", text)[1]


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(HEADING)] + section())
    print(f"{PAGE.name}: {len(lines())} lines")
