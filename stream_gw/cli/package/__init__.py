"""Commands about the installed package: its files, and the completion of its flags."""
