"""For each exercise, answers that people really give: {"name of the check": [(function, words of its verdict)]}."""
