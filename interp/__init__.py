"""Where in a network a LoRA adapter makes its decision. Knows pairs and models, knows no environment."""
