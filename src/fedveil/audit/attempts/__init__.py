"""From a view to an attack's inputs: one function for each registered attack, run in a process of its own."""
