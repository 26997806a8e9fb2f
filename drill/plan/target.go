package plan

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

const targetHelp = `write for example "region eu", "owner of partition 1", "next owner of PARTITION", "bystander of partition 1", ` +
	`"leader of the owner of partition 1", "a follower of region eu", "server eu-1", "witness w1", "2 witnesses", "all witnesses", "all regions" or "all sites"`

// ParseTarget reads whom a step concerns.
func ParseTarget(s string) (Target, error) {
	t, err := target(strings.Fields(s))
	if err != nil {
		return Target{}, fmt.Errorf("target %q: %w; %s", s, err, targetHelp)
	}
	t.Text = strings.Join(strings.Fields(s), " ")
	return t, nil
}

func target(words []string) (Target, error) {
	words = article(words)
	if len(words) < 2 {
		return Target{}, errors.New("names nobody")
	}
	head, rest := words[0], words[1:]
	switch {
	case head == "all" && len(rest) == 1 && rest[0] == "witnesses":
		return Target{Who: AllWitnesses}, nil
	case head == "all" && len(rest) == 1 && rest[0] == "regions":
		return Target{Who: AllRegions}, nil
	case head == "all" && len(rest) == 1 && rest[0] == "sites":
		return Target{Who: AllSites}, nil
	case head == "server" && len(rest) == 1:
		return Target{Who: TheServer, Name: rest[0]}, nil
	case head == "witness" && len(rest) == 1:
		return Target{Who: TheWitness, Name: rest[0]}, nil
	case len(rest) == 1 && (rest[0] == "witness" || rest[0] == "witnesses"):
		n, err := strconv.Atoi(head)
		if err != nil || n < 1 || n > 7 {
			return Target{}, fmt.Errorf("%q is not a number from 1 to 7", head)
		}
		return Target{Who: SomeWitnesses, Count: n}, nil
	case rest[0] == "of" && (head == "leader" || head == "followers" || head == "follower"):
		t, err := region(article(rest[1:]))
		t.Who = map[string]Who{"leader": TheLeader, "followers": TheFollowers, "follower": AFollower}[head]
		return t, err
	default:
		return region(words)
	}
}

// article leaves out a first word that only makes a sentence of it.
func article(words []string) []string {
	if len(words) > 0 && (words[0] == "the" || words[0] == "a" || words[0] == "an") {
		return words[1:]
	}
	return words
}

func region(words []string) (Target, error) {
	t := Target{Who: TheRegion}
	var part []string
	switch {
	case len(words) == 2 && words[0] == "region":
		t.Name = words[1]
		return t, nil
	case len(words) > 2 && words[0] == "owner" && words[1] == "of":
		t.Role, part = Owner, words[2:]
	case len(words) > 3 && words[0] == "next" && words[1] == "owner" && words[2] == "of":
		t.Role, part = Next, words[3:]
	case len(words) > 2 && words[0] == "bystander" && words[1] == "of":
		t.Role, part = Bystander, words[2:]
	default:
		return Target{}, fmt.Errorf("%q is no region", strings.Join(words, " "))
	}
	var err error
	t.Partition, err = parsePart(part)
	return t, err
}

// ParsePart reads a partition: its name, or "partition 2" for the second one of
// the cluster file.
func ParsePart(s string) (Part, error) { return parsePart(article(strings.Fields(s))) }

func parsePart(words []string) (Part, error) {
	switch {
	case len(words) == 2 && words[0] == "partition":
		if strings.Trim(words[1], "0123456789") != "" {
			return Part{Name: words[1]}, nil
		}
		n, err := strconv.Atoi(words[1])
		if err != nil || n < 1 || n > 1000 {
			return Part{}, fmt.Errorf("partition %s: they are counted from 1", words[1])
		}
		return Part{Number: n}, nil
	case len(words) == 1:
		return Part{Name: words[0]}, nil
	default:
		return Part{}, fmt.Errorf(`%q is no partition; write its name, or "partition 1" for the first of the cluster file`, strings.Join(words, " "))
	}
}

func (p Part) String() string {
	if p.Number > 0 {
		return "partition " + strconv.Itoa(p.Number)
	}
	return p.Name
}
