"""What all tests share."""

from hypothesis import settings

# How long an example takes says nothing about the code on a busy machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
