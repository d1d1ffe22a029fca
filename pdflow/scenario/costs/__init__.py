"""What steps and transfers take, as a scenario says it."""
