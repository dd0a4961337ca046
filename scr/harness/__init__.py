"""What the three studies share: measurement, statistics, machine facts, the record, plots and reports."""
