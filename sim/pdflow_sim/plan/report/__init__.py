"""A plan as charts and as one page of HTML: functions of a PlanOutcome, which decide nothing that it does not say."""
