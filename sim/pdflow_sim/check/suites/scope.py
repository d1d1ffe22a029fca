"""`pdflow check scope --set FIELD=VALUE`: search every state of a scope from the command line."""

from __future__ import annotations

from rich.console import Console

from pdflow_sim.check.scopes.fields import described, scope_from_text
from pdflow_sim.check.scopes.named import Named
from pdflow_sim.check.suites.scopes import searched
from pdflow_sim.check.suites.suite import CheckOptions, SuiteResult


def scope(options: CheckOptions, console: Console) -> SuiteResult:
    """Search the scope of the options. It has no goals to reach: those that it reaches are printed. Raises
    ScenarioError."""
    wanted = scope_from_text(options.settings, options.dialect)
    result = searched([Named(described(wanted), wanted, frozenset())], options, console)
    for row in result.rows:
        console.print(f"goals reached: {', '.join(row['goals']) or 'none'}", soft_wrap=True)
    return result
