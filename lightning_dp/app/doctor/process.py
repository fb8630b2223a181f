"""One of DDP's processes, which the doctor starts for step times."""

from argparse import ArgumentParser

from lightning_dp.app.doctor.command import add_own_options, devices_named
from lightning_dp.app.doctor.own_workload import own_workloads
from lightning_dp.doctor import OWN_TWO, answer


def main() -> None:
    """Entry point: options name the devices, and the user's own module if it is to be timed."""
    parser = ArgumentParser()
    parser.add_argument("--devices")
    add_own_options(parser)
    options = parser.parse_args()
    own = own_workloads(options.module, options.data, options.overrides)
    answer(own or OWN_TWO, devices_named(options.devices))


if __name__ == "__main__":
    main()
