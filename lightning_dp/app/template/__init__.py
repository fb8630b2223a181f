"""A model and its data, trained by lightning_dp."""
