"""The teacher: corrects failed rollouts and cuts out the prefix that student and teacher share."""
