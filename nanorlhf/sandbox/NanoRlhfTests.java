import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.util.Arrays;

/** What the tests and the prompt's classes call. They are trusted, the program's replies are not. */
public class NanoRlhfTests {
    /** The program has ended. */
    static class Ended extends Error {
        Ended() {
            raised = this;
        }
    }

    /** The program has answered with an object of a class that isn't the prompt's, or with an invalid message. */
    static class NoValue extends Error {
        NoValue(String problem) {
            super(problem);
            isBroken = true;
        }
    }

    /** A value that can't be sent. */
    static class ProgramException extends RuntimeException {
        ProgramException(String message) {
            super(message);
        }
    }

    /** No object: marks the stubs' constructors for subclasses. */
    public static class None {
    }

    static int failures;
    static int answers; // of the program
    static int line; // of the tests, where an exception left them; 0 if none did
    static boolean isBroken; // whether an answer was an invalid object
    static Throwable raised; // the program's last exception
    private static NanoRlhfSession session;
    private static String[] classes; // for the program, until it has them

    /** For the next program. */
    static void begin(NanoRlhfSession ofTheTests, String[] classesOfThePrompt) {
        failures = answers = line = 0;
        isBroken = false;
        raised = null;
        session = ofTheTests;
        classes = classesOfThePrompt;
    }

    /** Called instead of a test's throw for a wrong answer, so that the remaining tests still run. */
    public static synchronized void fail(String message) {
        failures++;
        System.err.println(message);
    }

    /**
     * Ask the program: call a method, or read a static field (types: null). Calls of the program to the tests' objects
     * come before its reply.
     */
    public static synchronized Object call(String owner, String name, String types, Object target, Object... arguments) {
        if (classes != null) {
            Object[] first = classes;
            classes = null;
            call(null, null, null, null, first);
            answers--;
        }
        NanoRlhfValues graph = new NanoRlhfValues(session);
        Object[] message = {owner, name, types, target, arguments};
        for (char kind = 'c'; ; kind = 'r') {
            byte[] bytes;
            try {
                bytes = graph.write(message);
            } catch (NanoRlhfValues.Refused error) {
                throw new ProgramException("the tests pass a " + error.getMessage() + ": only values can be sent");
            }
            bytes = NanoRlhfHarness.ask(kind, bytes);
            try {
                Object[] reply = (Object[]) graph.read(bytes, 0);
                switch ((String) reply[0]) {
                    case "answer":
                        answers++;
                        return reply[1];
                    case "exception":
                        answers++;
                        raised = (Throwable) reply[1];
                        break;
                    case "call":
                        message = called(reply[1], (String) reply[2], (String) reply[3], (Object[]) reply[4]);
                        continue;
                    default: throw new NoValue("the program's answer is no value but an object of " + reply[1]);
                }
            } catch (RuntimeException | ReflectiveOperationException | LinkageError error) {
                throw new NoValue("the program's reply is no value: " + error);
            }
            throw sneak(raised);
        }
    }

    /** Make an object by a constructor of the program: `object` gets its fields. */
    public static void construct(Object object, String owner, String types, Object... arguments) {
        call(owner, "<init>", types, session.number(object), arguments);
    }

    /** Make an object in the program too, where its class has fields that the prompt's doesn't. */
    public static void twin(Object object, String owner, String types, Object... arguments) {
        if (!session.has(object)) {
            call(owner, "<twin>", types, session.number(object), arguments);
            answers--; // nothing was asked
        }
    }

    /** Call an object of the tests for the program. */
    private static Object[] called(Object object, String name, String types, Object[] arguments)
        throws ReflectiveOperationException {
        for (Class<?> type : session.interfaces(object)) {
            for (Method method : type.getMethods()) {
                if (method.getName().equals(name) && NanoRlhfProgram.types(method).equals(types)) {
                    method.setAccessible(true);
                    try {
                        return new Object[] {true, method.invoke(object, arguments)};
                    } catch (InvocationTargetException error) {
                        return new Object[] {false, error.getCause()};
                    }
                }
            }
        }
        throw new NoSuchMethodException(name);
    }

    @SuppressWarnings("unchecked")
    private static <E extends Throwable> RuntimeException sneak(Throwable error) throws E {
        throw (E) error;
    }

    /** Run the tests; return the reason of a verdict. */
    static String run(ClassLoader loader, PrintStream err) {
        Throwable thrown = null;
        try {
            Method main = Class.forName("Main", true, loader).getMethod("main", String[].class);
            main.setAccessible(true);
            main.invoke(null, (Object) new String[0]);
        } catch (InvocationTargetException error) {
            thrown = error.getCause();
        } catch (Throwable error) {
            thrown = error;
        }
        if (thrown instanceof ExceptionInInitializerError error && error.getCause() != null) {
            thrown = error.getCause();
        }
        if (thrown instanceof OutOfMemoryError) {
            return "memory";
        } else if (thrown != null) {
            StackTraceElement[] frames = thrown.getStackTrace();
            for (StackTraceElement frame : frames) {
                line = frame.getClassName().equals("Main") ? frame.getLineNumber() : line;
            }
            boolean byTheTest = frames.length > 0 && frames[0].getClassName().equals("Main");
            boolean isVerdict = thrown.getClass() == Exception.class || thrown.getClass() == AssertionError.class;
            if (thrown != raised) { // the program prints its own exceptions
                thrown.setStackTrace(Arrays.stream(frames).filter(f -> f.getClassName().startsWith("Main"))
                    .toArray(StackTraceElement[]::new));
                thrown.printStackTrace(err);
            }
            return byTheTest && isVerdict && thrown != raised ? "wrong_answer" : "exception";
        }
        return isBroken ? "exception" : failures > 0 ? "wrong_answer" : "passed";
    }
}
