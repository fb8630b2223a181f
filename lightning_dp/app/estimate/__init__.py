"""``lightning-dp estimate``: the memory that each device needs, and the largest batch that fits.

Decided here: what a trial step is and what of its memory is told (`bench`), which batch sizes and
splits are tried (`search`), what is printed (`report`), and which options there are (`command`).
"""

from lightning_dp.app.estimate.command import main as main
