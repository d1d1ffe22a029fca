"""Published measurements that nothing was fitted on: rows.csv, their sources, and what the presets say of them."""
