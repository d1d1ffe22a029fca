"""The state of an explored world, what makes two states equal, and what is judged of one."""
