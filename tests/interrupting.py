"""Ctrl-C at chosen steps of a training."""

import signal


def press_ctrl_c_after(monkeypatch, ctrl_c, *steps):
    """Presses Ctrl-C after these steps, each once; `ctrl_c` is the class that examples ask whether to stop."""
    asks_to_stop, left = ctrl_c.asks_to_stop, set(steps)

    def press(self, num_steps):
        if num_steps in left:
            left.remove(num_steps)
            signal.raise_signal(signal.SIGINT)
        return asks_to_stop(self, num_steps)

    monkeypatch.setattr(ctrl_c, "asks_to_stop", press)
