"""What people look at: tables and pictures of plans and searches. matplotlib is imported by the pictures only."""
