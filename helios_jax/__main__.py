"""`python -m helios_jax` is the `helios-jax` command."""

from helios_jax.cli import main

if __name__ == "__main__":
    main()
