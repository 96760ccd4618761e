"""The effect of each optimizer on one row, in float64 and plain NumPy. Imports nothing of jaxsok, JAX or Optax.

A formula is (initial state of a dim, step); a step is (row, state, gradient, learning rate, t) -> (row, state), with t
the number of updates of the collection, including this update. Written from the papers, not from the library: FTRL
and the group lasso keep the sums of their papers, and moments follow the papers' recursions.
"""

import math

import numpy as np


def zeros(*widths):
    """Returns a state of zeros: "dim" or a number."""
    return lambda dim: [np.zeros(dim if width == "dim" else width) for width in widths]


def sgd(momentum=None, nesterov=False, weight_decay=0.0):
    def step(row, state, gradient, rate, t):
        gradient = gradient + weight_decay * row
        if momentum is None:
            return row - rate * gradient, []
        velocity = momentum * state[0] + gradient
        return row - rate * (gradient + momentum * velocity if nesterov else velocity), [velocity]

    return (zeros() if momentum is None else zeros("dim")), step


def adagrad(initial=0.1, eps=1e-7, weight_decay=0.0, eps_in_sqrt=True):
    def step(row, state, gradient, rate, t):
        gradient = gradient + weight_decay * row
        total = state[0] + gradient**2
        root = np.sqrt(total + eps) if eps_in_sqrt else np.sqrt(total) + eps
        return row - rate * gradient / root, [total]

    return (lambda dim: [np.full(dim, initial)]), step


def rowwise_adagrad(initial=0.0, eps=1e-8, weight_decay=0.0, eps_in_sqrt=False):
    def step(row, state, gradient, rate, t):
        gradient = gradient + weight_decay * row
        total = state[0] + np.array([np.sum(gradient**2) / len(gradient)])
        root = np.sqrt(total + eps) if eps_in_sqrt else np.sqrt(total) + eps
        return row - rate * gradient / root, [total]

    return (lambda dim: [np.array([initial])]), step


def _moments(state, first, second, b1, b2, t):
    m, v = b1 * state[0] + (1 - b1) * first, b2 * state[1] + (1 - b2) * second
    return m, v, m / (1 - b1**t), v / (1 - b2**t)


def adamw(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0):
    def step(row, state, gradient, rate, t):
        m, v, m_hat, v_hat = _moments(state, gradient, gradient**2, b1, b2, t)
        return (1 - rate * weight_decay) * row - rate * m_hat / (v_hat**0.5 + eps), [m, v]

    return zeros("dim", "dim"), step


def rowwise_adam(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0):
    def step(row, state, gradient, rate, t):
        square = np.array([gradient @ gradient / len(gradient)])
        m, v, m_hat, v_hat = _moments(state, gradient, square, b1, b2, t)
        return (1 - rate * weight_decay) * row - rate * m_hat / (v_hat**0.5 + eps), [m, v]

    return zeros("dim", 1), step


def nadam(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0):
    def step(row, state, gradient, rate, t):
        m, v, _, v_hat = _moments(state, gradient, gradient**2, b1, b2, t)
        ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * gradient / (1 - b1**t)
        return (1 - rate * weight_decay) * row - rate * ahead / (v_hat**0.5 + eps), [m, v]

    return zeros("dim", "dim"), step


def adamax(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0):
    def step(row, state, gradient, rate, t):
        m = b1 * state[0] + (1 - b1) * gradient
        u = np.maximum(b2 * state[1], np.abs(gradient) + eps)
        return (1 - rate * weight_decay) * row - rate / (1 - b1**t) * m / u, [m, u]

    return zeros("dim", "dim"), step


def lion(b1=0.9, b2=0.99, weight_decay=1e-3):
    def step(row, state, gradient, rate, t):
        direction = np.sign(b1 * state[0] + (1 - b1) * gradient)
        return (1 - rate * weight_decay) * row - rate * direction, [b2 * state[0] + (1 - b2) * gradient]

    return zeros("dim"), step


def rmsprop(
    decay=0.9, eps=1e-8, initial=0.0, eps_in_sqrt=True, centered=False, momentum=None, nesterov=False, correct=False
):
    def step(row, state, gradient, rate, t):
        divisor = 1 - decay**t if correct else 1.0
        v = decay * state[0] + (1 - decay) * gradient**2
        new, square = [v], v / divisor
        if centered:
            m = decay * state[1] + (1 - decay) * gradient
            new, square = [v, m], square - (m / divisor) ** 2
        update = rate * gradient / (np.sqrt(square + eps) if eps_in_sqrt else np.sqrt(square) + eps)
        if momentum is not None:
            velocity = momentum * state[-1] + update
            new, update = [*new, velocity], (update + momentum * velocity if nesterov else velocity)
        return row - update, new

    def initial_state(dim):
        others = [np.zeros(dim)] * (int(centered) + int(momentum is not None))
        return [np.full(dim, initial), *others]

    return initial_state, step


def adadelta(rho=0.9, eps=1e-6, weight_decay=0.0):
    def step(row, state, gradient, rate, t):
        gradient = gradient + weight_decay * row
        squares = rho * state[0] + (1 - rho) * gradient**2
        update = gradient * np.sqrt((state[1] + eps) / (squares + eps))
        return row - rate * update, [squares, rho * state[1] + (1 - rho) * update**2]

    return zeros("dim", "dim"), step


def adagrad_decay(initial=0.1, decay_step=100_000, decay_rate=0.9, weight_decay=0.0):
    """Follows the dense optimizer: successive decays, including those that the row missed."""

    def step(row, state, gradient, rate, t):
        gradient, total = gradient + weight_decay * row, state[0]
        for _ in range(int(state[1][0]), t // decay_step):
            total = np.maximum(total * decay_rate, initial)
        total = total + gradient**2
        return row - rate * gradient / np.sqrt(total), [total, np.array([float(t // decay_step)])]

    return (lambda dim: [np.full(dim, initial), np.zeros(1)]), step


def _length(row):
    return math.sqrt(sum(float(x) ** 2 for x in row))


def lamb(b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.0):
    def step(row, state, gradient, rate, t):
        m, v, m_hat, v_hat = _moments(state, gradient, gradient**2, b1, b2, t)
        update = m_hat / (v_hat**0.5 + eps) + weight_decay * row
        of_row, of_update = _length(row), _length(update)
        ratio = of_row / of_update if of_row > 0 and of_update > 0 else 1.0
        return row - rate * ratio * update, [m, v]

    return zeros("dim", "dim"), step


def lars(weight_decay=0.0, trust=0.001, eps=0.0, momentum=0.9, nesterov=False):
    def step(row, state, gradient, rate, t):
        gradient = gradient + weight_decay * row
        of_row, of_gradient = _length(row), _length(gradient)
        ratio = trust * of_row / (of_gradient + eps) if of_row > 0 and of_gradient > 0 else 1.0
        update = rate * ratio * gradient
        velocity = momentum * state[0] + update
        return row - (update + momentum * velocity if nesterov else velocity), [velocity]

    return zeros("dim"), step


def _shrunk(z, quadratic, l1, l21):
    """Returns the minimum over x of z·x + quadratic/2·x² + l1·|x| + l21·sqrt(dim)·||x||, number by number."""
    kept = np.array([math.copysign(max(abs(x) - l1, 0.0), x) for x in z])
    threshold, length = l21 * math.sqrt(len(z)), _length(kept)
    if length <= threshold:
        return np.zeros(len(z))
    return np.array(
        [-(1 - threshold / length) * k / q if k != 0 else 0.0 for k, q in zip(kept, quadratic, strict=True)]
    )


def ftrl(power=-0.5, initial=0.1, l1=0.0, l2=0.0, l2_shrinkage=0.0, beta=0.0, l21=0.0):
    def step(row, state, gradient, rate, t):
        total, z = state
        new_total = total + gradient**2
        sigma = (new_total**-power - total**-power) / rate
        z = z + gradient + 2 * l2_shrinkage * row - sigma * row
        return _shrunk(z, (new_total**-power + beta) / rate + 2 * l2, l1, l21), [new_total, z]

    return (lambda dim: [np.full(dim, initial), np.zeros(dim)]), step


def group_adam(b1=0.9, b2=0.999, eps=1e-8, l1=0.0, l2=0.0, l21=0.0):
    """Keeps z and the last q, as the paper does; jaxsok stores `z + q * row` instead."""

    def step(row, state, gradient, rate, t):
        m, v, m_hat, v_hat = _moments(state, gradient, gradient**2, b1, b2, t)
        q = (np.sqrt(v_hat) + eps) / rate
        z = state[2] + m_hat - (q - state[3]) * row
        return _shrunk(z, q + 2 * l2, l1, l21), [m, v, z, q]

    return zeros("dim", "dim", "dim", "dim"), step


def limit(formula, clip_value=None, clip_row_norm=None, adaptive_clip=None, max_row_norm=None):
    """Returns a formula within limits; its steps also take the number of uses."""
    initial_state, inner = formula

    def step(row, state, gradient, rate, t, num_uses):
        if clip_value is not None:
            gradient = np.array([min(max(g, -clip_value), clip_value) for g in gradient])
        if clip_row_norm is not None and _length(gradient) > clip_row_norm:
            gradient = gradient * clip_row_norm / _length(gradient)
        if adaptive_clip is not None:
            bound = num_uses * max(adaptive_clip[0] * _length(row), adaptive_clip[1])
            if _length(gradient) > bound:
                gradient = gradient * bound / _length(gradient)
        row, state = inner(row, state, gradient, rate, t)
        if max_row_norm is not None and _length(row) > max_row_norm:
            row = row * max_row_norm / _length(row)
        return row, state

    return initial_state, step
