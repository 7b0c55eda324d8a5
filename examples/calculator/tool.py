"""The tool of examples/calculator_agent.yaml. Type hints and docstring are what the policy is told of it."""

import ast
import operator

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers joined by +, -, * and /, with parentheses, e.g. "3*(2+1)".
    """
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError(f"{ast.unparse(node)} is not a number or one of + - * /")
