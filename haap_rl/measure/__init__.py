"""Measuring the device under the program with torch, for `haap_rl.profile`; nothing else imports this package."""
