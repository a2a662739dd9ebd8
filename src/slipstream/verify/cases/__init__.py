"""One module per op, each with a ``SUITE``; adding an op to ``slipstream verify`` is one file."""
