/* Threads for large arrays: those of the program's own OpenMP, as many as it uses. Between two operations
 * of PyTorch they spin in wait for the next, so that others would have to fight them for the processors. */
#define _GNU_SOURCE /* for RTLD_DEFAULT */
#include "values.h"

#if defined(__linux__)

#include <dlfcn.h>
#include <pthread.h>

/* OpenMP as compilers call it, of GCC's library (https://gcc.gnu.org/onlinedocs/libgomp, "Implementing
 * PARALLEL construct"), which Clang's and Intel's have as well. */
typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);
typedef int (*Number)(void);

static Parallel parallel;
static Number most_threads, team_size, member;
static int alone; /* in a process that was forked, where threads of GCC's library are waited for forever */

static void be_alone(void) { alone = 1; }

/* PyTorch makes its OpenMP known to all of the program when it is imported, which may be later. */
static int is_found(void)
{
    if (parallel)
        return 1;
    Parallel found = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (!found)
        return 0;
    most_threads = (Number)dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    team_size = (Number)dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    member = (Number)dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    if (most_threads && team_size && member && !pthread_atfork(NULL, NULL, be_alone))
        parallel = found;
    return parallel != NULL;
}

int team(void) { return !alone && is_found() ? most_threads() : 1; }

typedef struct {
    Work work;
    void *data;
    size_t items;
} Task;

static void take_part(void *of)
{
    const Task *task = of;
    size_t size = (size_t)team_size(), i = (size_t)member();
    size_t from = task->items * i / size, to = task->items * (i + 1) / size;
    if (from < to)
        task->work(task->data, from, to);
}

void together(size_t items, Work work, void *data)
{
    Task task = {work, data, items};
    if (items > 1 && team() > 1)
        parallel(take_part, &task, 0, 0); /* all threads: GCC's library ends those that are left out */
    else
        work(data, 0, items);
}

#else

int team(void) { return 1; }
void together(size_t items, Work work, void *data) { work(data, 0, items); }

#endif
