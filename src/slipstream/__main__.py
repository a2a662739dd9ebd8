"""``python -m slipstream``, which is also what torchrun launches."""

from slipstream.cli import main

if __name__ == "__main__":
    main()
