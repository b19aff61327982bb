"""One check for each exercise: `check.name(your_function)` prints *passed*, *not done yet*, or what is wrong."""
