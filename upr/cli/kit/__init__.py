"""The kit of the commands: options, output, exit statuses, times."""
