"""Where in a network a LoRA adapter makes its decision. Knows pairs and models, knows no environment."""

import logging

# PEFT imports bitsandbytes where it is installed, which then warns of an optional package on every start.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
