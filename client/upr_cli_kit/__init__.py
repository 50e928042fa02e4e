"""Kit of the commands ``upr-server``, ``upr-admin``, ``upr-cat`` and ``upr-backup``: entry, options, output, exit statuses, times."""
