"""What differs between transfer methods: a small file each."""
