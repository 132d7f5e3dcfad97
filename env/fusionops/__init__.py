"""The fusion environment: an agent runs ops of a graph as kernels, chooses tiles, and says what stays in fast memory.

It is the published environment, its surprises included. Where its README and its code disagree, the module that follows
the code says so: `action` (missing config), `cost` (ephemeral and retained tensors, tiles, split matmuls, the naive
schedule), `rules` (what may run), `hints`, and `fusionops` (fast memory, reward, score, texts that cannot be read).
"""

from env.fusionops.action import Action, ActionError, parse_action
from env.fusionops.fusionops import FusionOpsEnv
from env.fusionops.graph import Graph, GraphError, Hardware, Op, Tensor
from env.fusionops.tasks import TASKS, load_task
from env.fusionops.topologies import generate_graph

__all__ = [
    "TASKS",
    "Action",
    "ActionError",
    "FusionOpsEnv",
    "Graph",
    "GraphError",
    "Hardware",
    "Op",
    "Tensor",
    "generate_graph",
    "load_task",
    "parse_action",
]
