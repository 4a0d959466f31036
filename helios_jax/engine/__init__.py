"""The life of a request: intake, queue, frames, publication; and the Python API around it."""
