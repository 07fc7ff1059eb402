"""Is a loop right? `audit` runs it; `check_loss_fn` looks at its loss alone."""
