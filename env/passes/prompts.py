"""The question about a program, and chats."""

from __future__ import annotations

import json

from env.passes.programs import Program

SYSTEM_PROMPT = (
    "You order compiler passes. Answer with <think>your reasoning</think>, then one tool call or the answer. Tools: "
    '<tool_call>{"name": "instrcount", "arguments": {"filename": "...", "optimization_flags": ["--sroa", ...]}}'
    '</tool_call> and <tool_call>{"name": "find_best_pass_sequence", "arguments": {"filename": "..."}}</tool_call>. '
    'Answer: <answer>["--sroa", ...]</answer>.'
)

# The task as the paper puts it; unlike in the published training samples, the file's name is in it.
QUESTION = """\
Act as a compiler optimization expert finding an optimal pass sequence for LLVM IR, aiming to reduce the total \
instruction count.
The LLVM IR code is represented by statistical features. The initial statistical features are:
```json
{features}
```
Initial instruction count: {instructions}
Note: When calling the 'instrcount' and 'find_best_pass_sequence' tools, use the exact filepath: {name}

Your task is to:
- Provide and evaluate the Initial Candidate Pass Sequence using the instrcount tool to determine its instruction \
count improvement compared to the default -Oz optimization.
- If the initial sequence provides a positive improvement (improvement_over_oz > 0), recommend it as the final answer.
- If the initial sequence does not provide a positive improvement (improvement_over_oz <= 0), use the \
find_best_pass_sequence tool to search for a better sequence.
- If the search finds a sequence with positive improvement (improvement_percentage > 0), recommend that sequence.
- If the search tool fails to find a sequence with positive improvement, recommend the default ["-Oz"] sequence as the \
safest option.
Present your reasoning step-by-step using <think> tags and tool interactions using <tool_call> and <tool_response> \
structure, concluding with the final recommended sequence in an <answer> tag.
"""


def question(program: Program) -> str:
    """What the agent is asked about a program: its features, its size, its name, and the steps."""
    features = json.dumps(program.named_features(), indent=2)
    return QUESTION.format(features=features, instructions=program.instructions, name=program.name)


def messages(observation: str, system: str = SYSTEM_PROMPT) -> tuple[dict[str, str], dict[str, str]]:
    """The chat that asks for the first turn."""
    return {"role": "system", "content": system}, {"role": "user", "content": observation}
