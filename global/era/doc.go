// Package era plans the beginning of an era: what force-quorum does when a
// majority of the voters is destroyed (docs/design.md, §2, Disaster). Pure.
//
// What it guarantees, if the voters named as destroyed stood still before the
// plan was made and never vote again:
//   - the plan is one for all survivors, who are a majority of their new
//     configuration and were none of the old one: every majority of before has a
//     destroyed voter in it, so that no head lease is renewed from then on;
//   - each register begins at Jump above the highest epoch that any survivor has
//     seen, and nobody takes it before D has passed on the voters' clocks;
//   - it refuses to plan while the survivors can still decide.
//
// A survivor whose data is not given could have seen a higher epoch than the
// others. So facts of every survivor are needed, and of a region those of a
// quorum of its servers.
package era
