"""The tensor scheduling environment: an agent fuses, tiles and retains, one node of a graph at a time."""

from env.scheduler.action import Action, ActionError
from env.scheduler.graph import Graph, GraphError, Hardware, Node
from env.scheduler.hardware import PRESETS, preset
from env.scheduler.real import REAL_GRAPHS, load_real
from env.scheduler.scheduler import SchedulerEnv, parse_action
from env.scheduler.tasks import TASKS, load_task
from env.scheduler.topologies import curriculum_graph, generate_graph, named_graph

__all__ = [
    "PRESETS",
    "REAL_GRAPHS",
    "TASKS",
    "Action",
    "ActionError",
    "Graph",
    "GraphError",
    "Hardware",
    "Node",
    "SchedulerEnv",
    "curriculum_graph",
    "generate_graph",
    "load_real",
    "load_task",
    "named_graph",
    "parse_action",
    "preset",
]
