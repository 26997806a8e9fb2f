// Package clusterclient makes package client's configuration of a cluster file.
package clusterclient

import (
	"github.com/headlease/headlease/client"
	"github.com/headlease/headlease/internal/clusterfile"
)

// Regions of the file, with their servers in its order.
func Regions(f clusterfile.File) []client.Region {
	out := make([]client.Region, len(f.Regions))
	for i, r := range f.Regions {
		out[i].Name = r.Name
		for _, s := range r.Servers {
			out[i].Servers = append(out[i].Servers, client.Server{Name: s.Name, API: s.API})
		}
	}
	return out
}
