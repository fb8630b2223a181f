"""``python -m lightning_dp``, also installed as ``lightning-dp``: see lightning_dp.app.train."""

from lightning_dp.app.train import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
