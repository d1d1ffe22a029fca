"""What goes wrong, when, and to whom: the plan of faults as data, and its drawing. Each world applies it."""
