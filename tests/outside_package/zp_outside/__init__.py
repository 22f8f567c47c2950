"""A self-play game with a critic, for zeroplay-jax."""
