"""The tensor scheduling environment: an agent fuses, tiles and retains, one node of a graph at a time."""

from env.scheduler.action import Action, ActionError
from env.scheduler.graph import Graph, GraphError, Hardware, Node
from env.scheduler.scheduler import SchedulerEnv, parse_action
from env.scheduler.tasks import TASKS, load_task
from env.scheduler.topologies import curriculum_graph, generate_graph

__all__ = [
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
    "load_task",
    "parse_action",
]
