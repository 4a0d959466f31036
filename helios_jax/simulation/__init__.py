"""Virtual time: the production scheduler against a synthetic device, without jax or a model."""

from helios_jax.simulation.clock import VirtualClock
from helios_jax.simulation.device import FakeDevice, LinearCosts
from helios_jax.simulation.driver import Arrival, Served, Simulation

__all__ = ["Arrival", "FakeDevice", "LinearCosts", "Served", "Simulation", "VirtualClock"]
